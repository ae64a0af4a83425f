"""A simulated daemon process: the real core, loop and conversations over the fake network."""

from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from kvcommon.messages import Hello, JobsEnded, Lookup, LookupResult, StepPlan
from kvworker.assembly import Machinery
from kvworker.conversations import Conversations
from kvworker.core.commands import FindKeys, SendToScheduler, WorkerCommand
from kvworker.core.core import CoreConfig, WorkerCore
from kvworker.core.events import SchedulerSaid, WorkerEvent
from kvworker.loop import Loop
from tests.pair.executor import SimExecutor

if TYPE_CHECKING:
    from tests.pair.world import World


class FakeWatch:
    """Who dies is said by the world."""

    def __init__(self) -> None:
        self._fds: dict[int, tuple[Hashable, int]] = {}
        self._next = 100

    @property
    def names(self) -> set[Hashable]:
        return {name for name, _ in self._fds.values()}

    def watch(self, name: Hashable, pid: int) -> bool:
        self.forget(name)
        self._next += 1
        self._fds[self._next] = (name, pid)
        return True

    def forget(self, name: Hashable) -> None:
        self._fds = {fd: one for fd, one in self._fds.items() if one[0] != name}

    def of(self, pids: set[int]) -> list[int]:
        return [fd for fd, (_, pid) in self._fds.items() if pid in pids]

    def ended(self, fd: int) -> Hashable | None:
        return self._fds.pop(fd)[0] if fd in self._fds else None


class FakeInbox:
    """Answers of the executor."""

    def __init__(self) -> None:
        self.events: deque[WorkerEvent] = deque()

    def take(self) -> list[WorkerEvent]:
        taken = list(self.events)
        self.events.clear()
        return taken


class Daemon:
    """One incarnation of the daemon of one rank."""

    def __init__(
        self, world: "World", rank: int, core_type: Callable[[CoreConfig], WorkerCore]
    ) -> None:
        self.world = world
        self.rank = rank
        self.store = world.store
        self.pid = world.new_pid()
        self.epoch = world.new_epoch()
        self.device = f"cpu:{rank}"
        self.endpoint = f"ipc://{rank}"
        self.alive = True
        self.frozen = False
        self._core = core_type(
            CoreConfig(
                device=self.device,
                store="memory",
                pid=self.pid,
                validate=True,
                store_down_after=3,
                verdict_grace_ms=3000,
            )
        )
        self._inbox = FakeInbox()
        self._watch = FakeWatch()
        self.executor = SimExecutor(
            self, world.memory_at, world.check_touch, self._inbox.events.append
        )
        #: (epoch, job) → its blocks; how often its end was told.
        self._jobs: dict[tuple[int, int], tuple[int, ...]] = {}
        self._ended: Counter[tuple[int, int]] = Counter()
        #: Lookup → longest prefix that every rank had when the store was asked; op → lookup.
        self._allowed: dict[int, int] = {}
        self._lookups: dict[int, Lookup] = {}
        talk: Any = Conversations(world.network.listen(self.endpoint), self.epoch)  # type: ignore[arg-type]
        fakes: Any = (None, self._core, self, None, self.executor)
        inbox: Any = self._inbox
        watch: Any = self._watch
        self._loop = Loop(
            talk, Machinery(*fakes), watch, inbox, 1000, clock_ns=lambda: world.now_ns
        )

    def __repr__(self) -> str:
        return f"daemon {self.pid} of rank {self.rank}"

    @property
    def core(self) -> WorkerCore:
        return self._core

    def turn(self) -> None:
        """The serving thread does what there is to do."""
        if self.alive and not self.frozen:
            self._loop.turn(self._watch.of(self.world.dead), lambda _: None)

    def kill(self) -> None:
        self.alive = False
        self.world.dead.add(self.pid)
        self.world.network.hang_up(self.endpoint)
        self.store.drop_puts(self)

    def note_found(self, op: int) -> None:
        """The store is asked now: what may a lookup say at most?"""
        lookup = self._lookups.pop(op)
        count = 0
        for block_hash in lookup.groups[0].block_hashes:
            if not self.store.is_whole(block_hash):
                break
            count += 1
        self._allowed[lookup.lookup_id] = count

    # In the place of the recorder.

    @property
    def stimulus(self) -> str:
        return ""

    def handle(self, event: WorkerEvent, _cause: str = "") -> list[WorkerCommand]:
        said = event.body if isinstance(event, SchedulerSaid) else None
        epoch = event.epoch if isinstance(event, SchedulerSaid) else 0
        if isinstance(said, StepPlan):
            for load in said.loads:
                self._jobs[epoch, load.job_id] = load.block_ids
            for save in said.saves:
                self._jobs[epoch, save.job_id] = save.block_ids
        commands = self._core.handle(event)
        for command in commands:
            if isinstance(command, FindKeys):
                assert isinstance(said, Lookup)
                self._lookups[command.op] = said
            elif isinstance(command, SendToScheduler):
                self._check(command.body, again=isinstance(said, Hello))
        return commands

    def _check(self, body: object, *, again: bool) -> None:
        if isinstance(body, LookupResult) and body.hits:
            allowed = self._allowed.pop(body.lookup_id, 0)
            assert body.hits[0].num_blocks <= allowed, "rule 8: a hit that some rank lacks"
        if isinstance(body, JobsEnded):
            engine = self._core._parts.engines.get(f"llm#{self.rank}")
            epoch = engine.scheduler_epoch if engine is not None else 0
            for end in body.ends:
                key = (epoch, end.job_id)
                assert again or not self._ended[key], f"rule 2: job {end.job_id} ended twice"
                self._ended[key] += 1
                blocks = set(self._jobs.get(key, ()))
                for op in self.executor.ops:
                    if op.started and op.memory is self.world.engine.models[self.rank].memory:
                        assert not blocks & set(op.command.block_ids), "rule 1: ended while touched"
