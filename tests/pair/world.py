"""Both real cores in one world: an engine, a daemon per rank, a store, and the network between.

Every rule that the world checks names itself in its assertion. What is not checked where it happens
is checked by ``settle``, when everything is let go on undisturbed.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from kvcommon.ids import Epoch
from kvcommon.keys import fingerprint
from kvsched.core.core import CoreConfig as SchedConfig
from kvsched.core.core import SchedCore
from kvsched.link import DaemonLink
from kvworker.core.core import CoreConfig as WorkerConfig
from kvworker.core.core import WorkerCore
from kvworker.outcome import Outcome
from tests.pair.daemon import Daemon
from tests.pair.model import namespace
from tests.pair.network import Network, Wire
from tests.pair.records import POOL, SIZE
from tests.pair.store import RIGHT, Memory, Store
from tests.pair.vllm import Engine

MS = 1_000_000
#: Turns after which a world that is left alone must be at rest.
_PATIENCE = 400


class FakeProcess:
    """A watched process."""

    def __init__(self, world: "World", pid: int) -> None:
        self._world = world
        self._pid = pid

    def is_dead(self) -> bool:
        return self._pid in self._world.dead

    def kill(self) -> str:
        self._world.killed(self._pid)
        return ""

    def close(self) -> None:
        """Nothing to close."""


class World:
    """Everything, and the clock."""

    def __init__(
        self,
        *,
        num_ranks: int = 1,
        depth: int = 1,
        load: str = "auto",
        sched: Callable[[SchedConfig], SchedCore] = SchedCore,
        worker: Callable[[WorkerConfig], WorkerCore] = WorkerCore,
        **config: Any,
    ) -> None:
        self.num_ranks = num_ranks
        self.now_ns = 1_000_000 * MS
        self.network = Network()
        self.dead: set[int] = set()
        self._count = 0
        self._memories: dict[int, Memory] = {}
        self._sched, self._worker = sched, worker
        self._depth = depth
        self.is_foreign = False
        base = SchedConfig(
            block_size=SIZE,
            num_blocks=POOL,
            sync_is_safe=depth == 1,
            max_held_blocks=POOL // 2,
            validate=True,
        )
        self._config = msgspec.structs.replace(base, load=load, **config)
        self.store = Store(tuple(fingerprint(namespace(rank)) for rank in range(num_ranks)))
        self.engine = self._new_engine()
        self.daemons: list[Daemon] = []
        for rank in range(num_ranks):
            self.daemons.append(Daemon(self, rank, self._worker))

    def _new_engine(self) -> Engine:
        return Engine(self, self._config, self._sched, self._depth)

    # What the parts ask of the world.

    def new_pid(self) -> int:
        self._count += 1
        return 1000 + self._count

    def new_epoch(self) -> Epoch:
        self._count += 1
        return Epoch(self._count)

    def new_memory(self) -> tuple[int, Memory]:
        self._count += 1
        memory = self._memories[self._count] = Memory(POOL)
        return self._count, memory

    def memory_at(self, address: int) -> Memory:
        return self._memories[address]

    def watch(self, pid: int) -> FakeProcess:
        return FakeProcess(self, pid)

    def may_kill(self, _link: DaemonLink, _pid: int) -> bool:
        """Daemons may be fenced, unless they belong to another user."""
        return not self.is_foreign

    def killed(self, pid: int) -> None:
        """A daemon was fenced."""
        for daemon in self.daemons:
            if daemon.pid == pid and daemon.alive:
                daemon.kill()

    def check_touch(self, memory: Memory, block: int, block_hash: bytes) -> None:
        """Rule 1: a daemon touches a block of a living engine only for a job that holds it."""
        if all(memory is not model.memory for model in self.engine.models):
            return
        held = [job for job, blocks in self.engine.held.items() if block in blocks]
        assert held, f"rule 1: block {block} is touched, and no job holds it"
        for job_id in held:
            job = self.engine.core._state.ledger.get(job_id)
            if job is not None and (block, block_hash) in set(
                zip(job.block_ids, job.block_hashes, strict=True)
            ):
                return
        raise AssertionError(f"rule 1: block {block} is touched for a job that does not hold it")

    # What may happen.

    def tick(self, ms: int) -> None:
        self.now_ns += ms * MS
        self.turn()

    def turn(self) -> None:
        """Everybody looks at what has arrived."""
        for daemon in self.daemons:
            daemon.turn()
        for model in self.engine.models:
            model.poll()
        self.engine.poll()

    def restart_daemon(self, rank: int) -> None:
        old = self.daemons[rank]
        if old.alive:
            old.kill()
        self.daemons[rank] = Daemon(self, rank, self._worker)

    def restart_engine(self) -> None:
        """The engine is killed, and another one starts with the same name."""
        self.engine.close()
        self.turn_daemons()
        self.engine = self._new_engine()

    def turn_daemons(self) -> None:
        for daemon in self.daemons:
            daemon.turn()

    def deliver(self, wire: Wire, *, to_daemon: bool, index: int = 0, keep: bool = False) -> None:
        if to_daemon:
            daemon = self.daemons[int(wire.endpoint[6:])]
            if not daemon.frozen and wire.deliver_to_daemon(index, keep=keep):
                daemon.turn()
        else:
            wire.deliver_to_dealer(index, keep=keep)

    def deliver_all(self) -> bool:
        """Deliver everything in order; False if there was nothing."""
        moved = False
        for wire in list(self.network.wires):
            daemon = self.daemons[int(wire.endpoint[6:])]
            while wire.to_daemon and daemon.alive and not daemon.frozen:
                self.deliver(wire, to_daemon=True)
                moved = True
            while wire.to_dealer and wire.is_open:
                self.deliver(wire, to_daemon=False)
                moved = True
        return moved

    def work_all(self) -> bool:
        """Let every operation end well; False if there was none."""
        moved = False
        for daemon in self.daemons:
            while daemon.alive and daemon.executor.ops:
                for op in daemon.executor.heads():
                    daemon.executor.work(op, Outcome.OK)
                daemon.turn()
                moved = True
        return moved

    # The end.

    def settle(self) -> None:
        """Left alone everything ends: each request, each job, each session."""
        for daemon in self.daemons:
            daemon.frozen = False
        for _ in range(_PATIENCE):
            # The supervisor's work, also for one that is fenced only now, for its long silence.
            for daemon in list(self.daemons):
                if not daemon.alive:
                    self.restart_daemon(daemon.rank)
            self.tick(200)
            self.deliver_all()
            self.work_all()
            self.turn()
            self._step()
            if self._at_rest():
                break
        self._check_rest()

    def _step(self) -> None:
        engine = self.engine
        if engine.ready_to_run() is not None:
            engine.run(wait=True)
        elif engine.steps:
            engine.finish_step()
        elif engine.requests or engine.core.has_pending or engine.core.wants_step:
            engine.schedule()

    def _at_rest(self) -> bool:
        engine = self.engine
        return not (
            engine.requests
            or engine.steps
            or engine.core.has_pending
            or any(daemon.executor.ops for daemon in self.daemons)
            or any(not model.attached for model in engine.models)
            or not engine.core.serving
        )

    def _check_rest(self) -> None:
        engine = self.engine
        assert not engine.requests, f"hung: {engine.requests} {engine.pool.free} {engine.held}"
        assert not engine.core.has_pending, "rule 2: jobs never end"
        assert not engine.held, f"rule 2: blocks are held for ever: {engine.held}"
        assert sorted(engine.pool.free) == list(range(1, POOL)), "leaked blocks"
        assert engine.core.num_held_blocks == 0
        assert engine.core.serving, f"a daemon never comes back: {engine.core._state.ranks.all()}"
        assert not self.store.puts, "put sessions are left open"
        for daemon in self.daemons:
            assert not daemon.executor.gets, "get sessions are left open"
            metrics = daemon.core.status().metrics
            for gauge in ("jobs", "lookups", "operations", "puts", "gets"):
                assert metrics[f"kvferry_{gauge}_open"] == 0, gauge
        for key, words in self.store.objects.items():
            assert all(word == RIGHT[self.store.names[key]] for word in words), "rule 3"
