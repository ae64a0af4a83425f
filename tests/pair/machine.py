"""What may happen in a pair world, drawn by Hypothesis: work mostly, trouble now and then."""

from collections.abc import Callable
from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvsched.core.core import SchedCore
from kvworker.core.commands import LoadLayers, OpenGets, OpenPuts, WriteLayers
from kvworker.core.core import WorkerCore
from kvworker.outcome import Outcome
from tests.pair.network import Wire
from tests.pair.world import World

_TROUBLE: dict[type, list[Outcome]] = {
    OpenGets: [Outcome.MISS, Outcome.DOWN],
    LoadLayers: [Outcome.FAILED, Outcome.EXPIRED],
    OpenPuts: [Outcome.FULL, Outcome.DOWN],
    WriteLayers: [Outcome.FAILED, Outcome.DOWN],
}
Choice = tuple[Callable[[], None], int]


class PairMachine(RuleBasedStateMachine):
    """One engine, one or two ranks."""

    #: Replaced by mutants.
    sched_type: type[SchedCore] = SchedCore
    worker_type: type[WorkerCore] = WorkerCore

    world: World

    @initialize(
        ranks=st.integers(1, 2),
        depth=st.integers(1, 2),
        load=st.sampled_from(["auto", "async"]),
        save_decode=st.booleans(),
        stored=st.integers(0, 8),
        calm=st.booleans(),
    )
    def start(  # noqa: PLR0917 (Hypothesis passes them by name)
        self, ranks: int, depth: int, load: str, save_decode: bool, stored: int, calm: bool
    ) -> None:
        self.world = World(
            num_ranks=ranks,
            depth=depth,
            load=load,
            save_decode=save_decode,
            sched=self.sched_type,
            worker=self.worker_type,
        )
        self.world.store.seed("A", stored)
        self._calm = calm
        self._data: Any = None
        for _ in range(4):
            self.world.tick(300)
            self.world.deliver_all()
            self.world.work_all()

    def _draw(self, strategy: Any) -> Any:
        return self._data.draw(strategy)

    @rule(data=st.data(), luck=st.integers(0, 15))
    def something_happens(self, data: st.DataObject, luck: int) -> None:
        self._data = data
        if luck == 7 and not self._calm:
            self._choose(self._troubles())
        elif luck >= 12:
            self._much_happens()
        else:
            self._choose(self._work())

    def _choose(self, choices: list[Choice]) -> None:
        flat = [happens for happens, weight in choices for _ in range(weight)]
        happens = flat[self._draw(st.integers(0, len(flat) - 1))]
        note(getattr(happens, "__name__", "deliver"))
        happens()
        self.world.turn()

    def _much_happens(self) -> None:
        """Some turns without trouble, so that requests get somewhere."""
        world = self.world
        for _ in range(self._draw(st.integers(1, 6))):
            world.tick(50)
            for daemon in world.daemons:
                if daemon.alive and not daemon.frozen:
                    daemon.turn()
            self._deliver_all()
            self._work_all()
            world.turn()
            if world.engine.ready_to_run() is not None:
                world.engine.run(wait=True)
            elif world.engine.steps:
                world.engine.finish_step()
            else:
                world.engine.schedule()

    def _deliver_all(self) -> None:
        for wire in list(self.world.network.wires):
            for _ in range(len(wire.to_daemon)):
                self.world.deliver(wire, to_daemon=True)
            for _ in range(len(wire.to_dealer)):
                self.world.deliver(wire, to_daemon=False)

    def _work_all(self) -> None:
        for daemon in self.world.daemons:
            if daemon.alive and not daemon.frozen:
                for op in daemon.executor.heads():
                    daemon.executor.work(op, Outcome.OK)
                daemon.turn()

    # Work.

    def _work(self) -> list[Choice]:
        world, engine = self.world, self.world.engine
        choices: list[Choice] = [(self._time_passes, 2)]
        if len(engine.requests) < 5:
            choices.append((self._request_comes, 3))
        if len(engine.steps) < engine.depth:
            choices.append((engine.schedule, 4))
        if engine.ready_to_run() is not None:
            choices.append((self._step_goes_on, 6))
        if engine.steps and engine.steps[0].is_over:
            choices.append((engine.finish_step, 5))
        if any(self._in_flight(wire) for wire in world.network.wires):
            choices.append((self._message_arrives, 8))
        if any(d.alive and not d.frozen and d.executor.ops for d in world.daemons):
            choices.append((self._operation_goes_on, 8))
        if any(r.status != "aborted" for r in engine.requests.values()):
            choices.append((self._request_is_aborted, 1))
        if engine.running:
            choices.append((self._request_is_preempted, 1))
        return choices

    def _in_flight(self, wire: Wire) -> bool:
        daemon = self.world.daemons[int(wire.endpoint[6:])]
        return bool(wire.to_dealer) or (bool(wire.to_daemon) and daemon.alive and not daemon.frozen)

    def _time_passes(self) -> None:
        self.world.tick(self._draw(st.sampled_from([1, 60, 300, 1100, 2500, 6000])))

    def _request_comes(self) -> None:
        text = self._draw(st.sampled_from("AAB"))
        self.world.engine.add(text, self._draw(st.integers(1, 36)), self._draw(st.integers(1, 3)))

    def _step_goes_on(self) -> None:
        # Not every wait lasts to its end.
        wait = self._draw(st.integers(0, 9)) != 7 or self._calm
        self.world.engine.run(wait=wait)

    def _a_wire(self) -> tuple[Wire, bool]:
        wires = [wire for wire in self.world.network.wires if self._in_flight(wire)]
        wire = wires[self._draw(st.integers(0, len(wires) - 1))]
        daemon = self.world.daemons[int(wire.endpoint[6:])]
        can_arrive = bool(wire.to_daemon) and daemon.alive and not daemon.frozen
        to_daemon = can_arrive and (not wire.to_dealer or self._draw(st.booleans()))
        return wire, to_daemon

    def _message_arrives(self) -> None:
        wire, to_daemon = self._a_wire()
        self.world.deliver(wire, to_daemon=to_daemon)

    def _operation_goes_on(self) -> None:
        daemons = [d for d in self.world.daemons if d.alive and not d.frozen and d.executor.ops]
        daemon = daemons[self._draw(st.integers(0, len(daemons) - 1))]
        heads = daemon.executor.heads()
        op = heads[self._draw(st.integers(0, len(heads) - 1))]
        trouble = Outcome.OK
        if not self._calm and self._draw(st.integers(0, 7)) == 5:
            trouble = self._draw(st.sampled_from(_TROUBLE.get(type(op.command), [Outcome.OK])))
        daemon.executor.work(op, trouble)

    def _request_is_aborted(self) -> None:
        alive = [r for r in self.world.engine.requests.values() if r.status != "aborted"]
        self.world.engine.finish(alive[self._draw(st.integers(0, len(alive) - 1))])

    def _request_is_preempted(self) -> None:
        self.world.engine.preempt(self.world.engine.running[-1])

    # Trouble.

    def _troubles(self) -> list[Choice]:
        world = self.world
        choices: list[Choice] = [
            (self._daemon_is_killed, 2),
            (self._daemon_freezes_or_thaws, 3),
            (self._engine_is_killed, 1),
            (self._objects_are_evicted, 2),
        ]
        if any(self._in_flight(wire) for wire in world.network.wires):
            choices += [(self._message_is_lost, 3), (self._message_is_repeated, 2)]
            choices += [(self._messages_are_reordered, 3)]
        return choices

    def _a_rank(self) -> int:
        rank: int = self._draw(st.integers(0, self.world.num_ranks - 1))
        return rank

    def _daemon_is_killed(self) -> None:
        rank = self._a_rank()
        if self.world.daemons[rank].alive and self._draw(st.booleans()):
            self.world.daemons[rank].kill()
        else:
            self.world.restart_daemon(rank)

    def _daemon_freezes_or_thaws(self) -> None:
        daemon = self.world.daemons[self._a_rank()]
        daemon.frozen = daemon.alive and not daemon.frozen

    def _engine_is_killed(self) -> None:
        self.world.restart_engine()

    def _objects_are_evicted(self) -> None:
        objects = self.world.store.objects
        if objects:
            del objects[list(objects)[self._draw(st.integers(0, 30)) % len(objects)]]

    def _message_is_lost(self) -> None:
        wire, to_daemon = self._a_wire()
        frames = wire.to_daemon if to_daemon else wire.to_dealer
        del frames[self._draw(st.integers(0, 3)) % len(frames)]

    def _message_is_repeated(self) -> None:
        wire, to_daemon = self._a_wire()
        self.world.deliver(wire, to_daemon=to_daemon, keep=True)

    def _messages_are_reordered(self) -> None:
        wire, to_daemon = self._a_wire()
        frames = wire.to_daemon if to_daemon else wire.to_dealer
        self.world.deliver(
            wire, to_daemon=to_daemon, index=self._draw(st.integers(0, 3)) % len(frames)
        )

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
