"""Both real cores, joined by a network of lists and a store of sets, recorded.

``Pair`` plays vLLM's part in a few calls. A test breaks the world around the cores (the store, a
daemon, the clock) or a core itself (``spoil``), and gets the logs that such a fault would leave.
Every event moves the one clock by a millisecond.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvcommon import messages as msg
from kvcommon.eventlog import LogWriter, Recorder, make_header
from kvcommon.ids import BlockHash
from kvcommon.keys import Namespace, fingerprint, store_key
from kvreplay.loading import LogSet, open_logs
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvsched.core.core import CoreConfig as SchedConfig
from kvsched.core.core import SchedCore
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.core.core import CoreConfig as WorkerConfig
from kvworker.core.core import WorkerCore
from kvworker.outcome import Outcome
from tests.support import playbook
from tests.support.schedplay import hashes, new

MS = 1_000_000
SIZE = 16
ENGINE = "eng-1"
NUM_LAYERS = playbook.NUM_LAYERS

#: Changes what a core answers to an event.
Spoil = Callable[[msgspec.Struct, list[Any]], list[Any]]
#: Says what the store answers to a command of a rank; None: as it is.
Answer = Callable[[int, Any], "Sequence[Outcome] | Outcome | None"]


class Spoilt:
    """A core with a planted fault."""

    def __init__(self, core: Any, spoil: Spoil | None) -> None:
        self.core = core
        self.spoil = spoil

    def handle(self, event: Any) -> list[Any]:
        commands: list[Any] = self.core.handle(event)
        return commands if self.spoil is None else self.spoil(event, commands)

    def validate(self) -> None:
        self.core.validate()


def namespace(rank: int) -> Namespace:
    return msgspec.structs.replace(playbook.NAMESPACE, rank=(0, rank))


class Pair:
    """One scheduler side, and one daemon per rank."""

    def __init__(
        self, directory: Path, *, ranks: int = 1, attached: bool = True, **config: Any
    ) -> None:
        self.directory = directory
        self.now_ns = 1000 * MS
        self.num_ranks = ranks
        #: Keys stored.
        self.store: set[str] = set()
        self.answer: Answer = lambda _rank, _command: None
        #: Operations whose answers are held back, by their type.
        self.slow: set[type] = set()
        self.parked: list[tuple[int, Any]] = []
        #: Ranks whose daemon hears nothing.
        self.dead: set[int] = set()
        self.spoil_sched: Spoil | None = None
        self.spoil_worker: Spoil | None = None
        self.failed: set[int] = set()
        self.tell: sched_do.TellModel | None = None
        self.match: sched_do.AnswerMatch | None = None
        self._queue: deque[tuple[int | None, Callable[[int], Any], str]] = deque()
        settings = SchedConfig(block_size=SIZE, sync_is_safe=True)
        settings = msgspec.structs.replace(settings, **config)
        self._writers: list[LogWriter] = []
        self.sched_core = Spoilt(SchedCore(settings), None)
        self.sched = self._recorder("kvsched", "kvsched-eng1", 1, settings, self.sched_core)
        self.worker_cores = [Spoilt(WorkerCore(self._worker_config()), None) for _ in range(ranks)]
        self.workers = [
            self._recorder(
                "kvworker", f"kvworker-cpu-{rank}", 2 + rank, self._worker_config(), core
            )
            for rank, core in enumerate(self.worker_cores)
        ]
        self._start(attached=attached)

    @staticmethod
    def _worker_config() -> WorkerConfig:
        return WorkerConfig(device="cpu:0", store="memory", pid=7)

    def _recorder(
        self, core: Any, name: str, epoch: int, config: Any, spoilt: Spoilt
    ) -> Recorder[Any, Any]:
        info = {"engine": ENGINE} if core == "kvsched" else {"device": "cpu:0"}
        header = make_header(core, name, epoch, config, versions={}, info=info)
        self._writers.append(LogWriter(self.directory, header))
        return Recorder(spoilt, self._writers[-1], name)

    def _start(self, *, attached: bool) -> None:
        identities = tuple(
            msg.RankIdentity(rank=rank, fingerprint=fingerprint(namespace(rank)))
            for rank in range(self.num_ranks)
        )
        self.say(sched.RanksKnown, ranks=identities)
        for rank in range(self.num_ranks):
            hello = msg.Hello(pid=1, ranks=identities)
            self.to_worker(rank, hello)
            if attached:
                body = playbook.attach(namespace=namespace(rank))
                self.model(rank, body)
        self.pump()

    # -- speaking ------------------------------------------------------------------------------

    def say(self, kind: type, cause: str = "", **fields: Any) -> None:
        """Tell the scheduler side's core, once it is its turn."""
        self._queue.append((None, lambda now: kind(now_ns=now, **fields), cause))

    def to_worker(self, rank: int, body: Any, cause: str = "") -> None:
        """A message of the scheduler side."""
        key = f"{ENGINE}#{rank}"
        self._queue.append(
            (
                rank,
                lambda now: work.SchedulerSaid(now_ns=now, engine=key, epoch=1, body=body),
                cause,
            )
        )

    def model(self, rank: int, body: Any) -> None:
        """A message of the model side."""
        key = f"{ENGINE}#{rank}"
        self._queue.append(
            (rank, lambda now: work.ModelSaid(now_ns=now, engine=key, epoch=9, body=body), "")
        )

    def worker_event(self, rank: int, kind: type, **fields: Any) -> None:
        self._queue.append((rank, lambda now: kind(now_ns=now, **fields), ""))

    def later(self, ms: int) -> None:
        self.now_ns += ms * MS

    def pump(self) -> None:
        """Deliver until everything is quiet."""
        self.sched_core.spoil = self.spoil_sched
        for core in self.worker_cores:
            core.spoil = self.spoil_worker
        while self._queue:
            rank, make, cause = self._queue.popleft()
            self.now_ns += MS
            if rank is None:
                for command in self.sched.handle(make(self.now_ns), cause):
                    self._sched_command(command)
            elif rank not in self.dead:
                for command in self.workers[rank].handle(make(self.now_ns), cause):
                    self._worker_command(rank, command)

    def release(self) -> None:
        """Answer what was held back."""
        self.slow.clear()
        parked, self.parked = self.parked, []
        for rank, command in parked:
            self._perform(rank, command)
        self.pump()

    # -- carrying out --------------------------------------------------------------------------

    def _sched_command(self, command: Any) -> None:
        if isinstance(command, sched_do.SendToDaemon):
            self.to_worker(command.rank, command.body, self.sched.stimulus)
        elif isinstance(command, sched_do.AnswerMatch):
            self.match = command
        elif isinstance(command, sched_do.TellModel):
            self.tell = command

    def _worker_command(self, rank: int, command: Any) -> None:
        if isinstance(command, work_do.SendToScheduler):
            self._tell_sched(rank, command.body, self.workers[rank].stimulus)
        elif isinstance(command, work_do.SendToModel):
            if isinstance(command.body, msg.JobsEnded):
                for end in command.body.ends:
                    self.failed |= set(end.failed_blocks)
        elif type(command) in self.slow:
            self.parked.append((rank, command))
        elif hasattr(command, "op") and not isinstance(command, work_do.Cancel):
            self._perform(rank, command)

    def _tell_sched(self, rank: int, body: Any, cause: str) -> None:
        if isinstance(body, msg.Welcome):
            self.say(sched.DaemonReady, cause, rank=rank, epoch=2 + rank, attached=body.attached)
        elif isinstance(body, msg.LookupResult):
            self.say(sched.LookupAnswered, cause, rank=rank, result=body)
        elif isinstance(body, msg.PlanAck):
            self.say(sched.PlanAcked, cause, rank=rank, step=body.step)
        elif isinstance(body, msg.JobsEnded):
            self.say(sched.JobsReported, cause, rank=rank, ends=body.ends)
        elif isinstance(body, msg.StoreHealth):
            up = body.state is msg.StoreState.UP
            self.say(sched.StoreChanged, cause, rank=rank, up=up, reason=body.reason)

    def _perform(self, rank: int, command: Any) -> None:
        outcomes = self.answer(rank, command)
        if outcomes is None:
            outcomes = self._store_says(command)
        fields = {"state": msg.StoreState.UP} if isinstance(command, work_do.ProbeStore) else {}
        if isinstance(command, work_do.ClosePuts):
            self.store |= set(command.end)
        self._queue.append(
            (rank, lambda now: playbook.answer_to(command, outcomes, now, **fields), "")
        )

    def _store_says(self, command: Any) -> Sequence[Outcome] | Outcome:
        if isinstance(command, (work_do.FindKeys, work_do.OpenGets)):
            return [Outcome.OK if key in self.store else Outcome.MISS for key in command.keys]
        if isinstance(command, work_do.OpenPuts):
            return [Outcome.EXISTS if key in self.store else Outcome.OK for key in command.keys]
        return Outcome.OK

    # -- vLLM ----------------------------------------------------------------------------------

    def key(self, block_hash: bytes, rank: int = 0) -> str:
        return store_key(fingerprint(namespace(rank)), 0, BlockHash(block_hash))

    def put(self, text: str, num_blocks: int, ranks: Iterable[int] | None = None) -> None:
        """The store holds the first blocks of a text, for all ranks or for these."""
        for rank in range(self.num_ranks) if ranks is None else ranks:
            self.store |= {self.key(one, rank) for one in hashes(num_blocks, text)}

    def add(self, name: str, num_tokens: int, text: str) -> None:
        self.say(
            sched.RequestAdded,
            request_id=name,
            num_tokens=num_tokens,
            block_hashes=hashes(num_tokens // SIZE, text),
        )
        self.pump()

    def ask(self, name: str, num_tokens: int, local: int = 0) -> sched_do.AnswerMatch:
        self.say(sched.MatchAsked, request_id=name, num_tokens=num_tokens, num_local_tokens=local)
        self.pump()
        assert self.match is not None
        return self.match

    def allocate(self, name: str, blocks: Iterable[int], external: int) -> None:
        self.say(
            sched.BlocksAllocated,
            request_id=name,
            block_ids=tuple(blocks),
            num_external_tokens=external,
        )
        self.pump()

    def schedule(
        self, step: int, name: str, blocks: Iterable[int], computed: int, scheduled: int
    ) -> None:
        self.tell = None
        request = new(name, blocks, computed, scheduled)
        self.say(sched.StepScheduled, step=step, requests=(request,))
        self.pump()

    def run(self, step: int, *, begin: bool = True) -> None:
        """The model processes run the step that was scheduled."""
        if self.tell is None:
            return
        for rank in range(self.num_ranks):
            if begin:
                self.model(rank, msg.StepBegun(step=step))
            self.pump()
            if self.tell.saves:
                for layer in range(1, NUM_LAYERS + 1):
                    self.model(rank, msg.LayersComputed(step=step, num_layers=layer))
        self.pump()

    def finish_step(self, step: int) -> None:
        invalid, self.failed = tuple(sorted(self.failed)), set()
        self.say(sched.StepFinished, step=step, invalid_block_ids=invalid)
        self.pump()

    def finish(self, name: str) -> None:
        self.say(sched.RequestFinished, request_id=name)
        self.pump()

    def serve(
        self, name: str, num_tokens: int, text: str, *, step: int = 1, first_block: int = 1
    ) -> None:
        """One request from its arrival to its end, in one step (and one more after a failure)."""
        blocks = range(first_block, first_block + -(-num_tokens // SIZE))
        self.add(name, num_tokens, text)
        answer = self.ask(name, num_tokens)
        tokens = answer.num_tokens or 0
        self.allocate(name, blocks, tokens)
        self.schedule(step, name, blocks, tokens, num_tokens - tokens)
        self.run(step)
        failed = sorted(self.failed)
        self.finish_step(step)
        if failed:
            valid = (failed[0] - first_block) * SIZE
            self.schedule(step + 1, name, blocks, valid, num_tokens - valid)
            self.run(step + 1)
            self.finish_step(step + 1)
        self.finish(name)

    def close(self) -> LogSet:
        self.pump()
        for writer in self._writers:
            writer.close()
        return open_logs([self.directory])
