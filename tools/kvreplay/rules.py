"""The design's rules, checked over the merged logs.

Every rule is a small class that reads each record once, in causal order, and names what breaks it.
A rule never accuses on the ground of a record that is missing: where a log does not begin at its
start or has gaps, what is not known is not judged.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvcommon import messages as msg
from kvreplay.loading import Entry
from kvreplay.ops import ANSWERS, ended_op, engine_of, key_hash, plan_jobs, started_op
from kvreplay.words import spans
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work


@dataclass(frozen=True)
class Open:
    """Something that had not ended when the logs did; no violation."""

    log: str
    text: str
    #: Engine key and job, where it is about one.
    engine: str = ""
    job_id: int | None = None
    #: Why it never ended (``fates``); empty: it may yet.
    fate: str = ""

    @property
    def sentence(self) -> str:
        """What ``verify`` says of it."""
        what = f"{self.text}: {self.fate}" if self.fate else f"open at the end: {self.text}"
        return f"{self.log}: {what}"


class Rule(ABC):
    """One rule of the design."""

    #: What ``verify`` calls it.
    name: str

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen; ``whole`` names the logs without missing records."""
        self._whole = whole

    @abstractmethod
    def check(self, entry: Entry) -> Iterator[tuple[str, int | None]]:
        """Read the next record; yield text and job (if one is known) of every violation."""

    def open(self) -> Iterator[Open]:
        """Yield what has not ended; called once, behind the last record."""
        yield from ()


class OpsEndOnce(Rule):
    """Every operation that a daemon starts is answered by exactly one event of the right kind."""

    name = "op-ends-once"

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen."""
        super().__init__(whole)
        self._running: dict[tuple[str, int], msgspec.Struct] = {}
        #: Operations are numbered upwards: the highest number started, by log.
        self._newest: dict[str, int] = {}

    def check(self, entry: Entry) -> Iterator[tuple[str, int | None]]:
        """Match the event's operation with a running one; note those that the commands start."""
        op = ended_op(entry.event)
        if op is not None:
            started = self._running.pop((entry.log, op), None)
            if started is None and entry.log in self._whole:
                known = op <= self._newest.get(entry.log, 0)
                yield f"op {op} {'ended twice' if known else 'ended but never started'}", None
            elif started is not None and ANSWERS[type(started)] is not type(entry.event):
                yield f"op {op} is a {type(started).__name__}, answered by {entry.kind}", None
        for command in entry.commands:
            op = started_op(command)
            if op is None:
                continue
            if (entry.log, op) in self._running:
                yield f"op {op} was started again while it runs", None
            self._running[entry.log, op] = command
            self._newest[entry.log] = max(op, self._newest.get(entry.log, 0))

    def open(self) -> Iterator[Open]:
        """Operations still running."""
        for (log, op), command in self._running.items():
            yield Open(log, f"op {op} ({type(command).__name__})", engine_of(command))


class JobsEndOnce(Rule):
    """A daemon ends every job that it was given exactly once on each rank.

    A ``Hello`` may ask again for jobs whose end was lost on the way; their end may be repeated.
    """

    name = "job-ends-once"

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen."""
        super().__init__(whole)
        #: By log, engine key and job: True: ended.
        self._jobs: dict[tuple[str, str, int], bool] = {}
        self._asked: set[tuple[str, str, int]] = set()

    def check(self, entry: Entry) -> Iterator[tuple[str, int | None]]:
        """Note given jobs, match ended ones."""
        event = entry.event
        if isinstance(event, work.SchedulerSaid):
            if isinstance(event.body, msg.StepPlan):
                for job in plan_jobs(event.body):
                    # The same plan may come again over a new connection.
                    self._jobs.setdefault((entry.log, event.engine, job.job_id), False)
            elif isinstance(event.body, msg.Hello):
                self._asked |= {(entry.log, event.engine, job) for job in event.body.open_jobs}
        for command in entry.commands:
            if isinstance(command, work_do.SendToScheduler) and isinstance(
                command.body, msg.JobsEnded
            ):
                for end in command.body.ends:
                    yield from self._end((entry.log, command.engine, end.job_id))

    def _end(self, job: tuple[str, str, int]) -> Iterator[tuple[str, int | None]]:
        log, engine, job_id = job
        ended = self._jobs.get(job)
        if job in self._asked:
            self._asked.discard(job)
        elif ended:
            yield f"job {job_id} ended twice on {engine}", job_id
        elif ended is None and log in self._whole:
            yield f"job {job_id} ended on {engine} but was never planned there", job_id
        self._jobs[job] = True

    def open(self) -> Iterator[Open]:
        """Jobs that have not ended."""
        for (log, engine, job_id), ended in self._jobs.items():
            if not ended:
                yield Open(log, f"job {job_id} on {engine}", engine, job_id)


class FreeAfterEnds(Rule):
    """Blocks are given back once, as they were held, after every rank has ended the job."""

    name = "free-after-ends"

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen."""
        super().__init__(whole)
        self._held: dict[tuple[str, int], tuple[int, ...]] = {}
        #: Ranks that have not reported, by log and job.
        self._waiting: dict[tuple[str, int], set[int]] = {}
        #: The same by log and rank: jobs that a rank may not have reported.
        self._given: dict[tuple[str, int], set[int]] = {}
        self._epochs: dict[tuple[str, int], int] = {}

    def check(self, entry: Entry) -> Iterator[tuple[str, int | None]]:
        """Follow holds, reports and releases of a scheduler side."""
        if entry.core != "kvsched":
            return
        self._event(entry.log, entry.event)
        for command in entry.commands:
            if isinstance(command, sched_do.SendToDaemon) and isinstance(
                command.body, msg.StepPlan
            ):
                for job in plan_jobs(command.body):
                    self._waiting.setdefault((entry.log, job.job_id), set()).add(command.rank)
                    self._given.setdefault((entry.log, command.rank), set()).add(job.job_id)
            elif isinstance(command, sched_do.HoldBlocks):
                if (entry.log, command.job_id) in self._held:
                    yield f"blocks of job {command.job_id} are held twice", command.job_id
                self._held[entry.log, command.job_id] = command.block_ids
        # A job may be planned, and given up, within one record: releases are judged last.
        for command in entry.commands:
            if isinstance(command, sched_do.FreeBlocks):
                yield from self._free(entry.log, command)

    def _event(self, log: str, event: msgspec.Struct | None) -> None:
        if isinstance(event, sched.JobsReported):
            for end in event.ends:
                self._waiting.get((log, end.job_id), set()).discard(event.rank)
                self._given.get((log, event.rank), set()).discard(end.job_id)
        elif isinstance(event, sched.DaemonLost) and event.dead:
            self._gone(log, event.rank)
        elif isinstance(event, sched.DaemonReady):
            if self._epochs.setdefault((log, event.rank), event.epoch) != event.epoch:
                self._gone(log, event.rank)
            self._epochs[log, event.rank] = event.epoch

    def _gone(self, log: str, rank: int) -> None:
        """A daemon's process is dead: it touches no block any more."""
        for job in self._given.pop((log, rank), set()):
            self._waiting.get((log, job), set()).discard(rank)

    def _free(self, log: str, command: sched_do.FreeBlocks) -> Iterator[tuple[str, int | None]]:
        job_id = command.job_id
        held = self._held.pop((log, job_id), None)
        waiting = self._waiting.pop((log, job_id), set())
        if held is None and log in self._whole:
            yield f"blocks of job {job_id} are given back but not held", job_id
        if held is not None and sorted(held) != sorted(command.block_ids):
            text = f"job {job_id} held blocks {spans(held)} but gives back "
            yield text + spans(command.block_ids), job_id
        if waiting:
            text = f"blocks of job {job_id} are given back before rank "
            yield f"{text}{spans(sorted(waiting))} has ended it", job_id

    def open(self) -> Iterator[Open]:
        """Blocks still held."""
        for (log, job_id), held in self._held.items():
            yield Open(log, f"blocks {spans(held)} held for job {job_id}")


class NothingTaintedPublished(Rule):
    """Objects are published only after the verdict on their step, and never of a tainted job."""

    name = "nothing-tainted-published"
    #: Steps of an engine that are remembered.
    max_steps = 256

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen."""
        super().__init__(whole)
        #: Save jobs by log and engine key, then step.
        self._saves: dict[tuple[str, str], dict[int, list[msg.SaveJob]]] = {}
        self._verdicts: dict[tuple[str, str], dict[int, frozenset[int]]] = {}

    def check(self, entry: Entry) -> Iterator[tuple[str, int | None]]:
        """Note saves and verdicts; judge what is published."""
        event = entry.event
        if isinstance(event, work.SchedulerSaid):
            where = (entry.log, event.engine)
            if isinstance(event.body, msg.StepPlan) and event.body.saves:
                steps = self._saves.setdefault(where, {})
                steps[event.body.step] = list(event.body.saves)
                self._trim(steps)
            elif isinstance(event.body, msg.StepVerdict):
                verdicts = self._verdicts.setdefault(where, {})
                verdicts[event.body.step] = frozenset(event.body.tainted)
                self._trim(verdicts)
        for command in entry.commands:
            if isinstance(command, work_do.ClosePuts) and command.end:
                yield from self._published(entry.log, command, command.end)
            elif isinstance(command, work_do.WriteLayers) and command.whole:
                # Without a session, writing is publishing.
                yield from self._published(entry.log, command, command.keys)

    def _trim(self, steps: dict[int, list[msg.SaveJob]] | dict[int, frozenset[int]]) -> None:
        while len(steps) > self.max_steps:
            del steps[next(iter(steps))]

    def _published(
        self, log: str, command: work_do.ClosePuts | work_do.WriteLayers, keys: tuple[str, ...]
    ) -> Iterator[tuple[str, int | None]]:
        where = (log, command.engine)
        saves = self._saves.get(where, {}).get(command.step)
        verdict = self._verdicts.get(where, {}).get(command.step)
        if verdict is None:
            if saves is not None and log in self._whole:
                text = f"step {command.step} is published without a verdict on it"
                yield text, saves[0].job_id
            return
        hashes = {key_hash(key) for key in keys}
        clean: set[str] = set()
        tainted: dict[str, int] = {}
        for job in saves or ():
            digests = {block.hex() for block in job.block_hashes} & hashes
            if job.job_id in verdict:
                tainted |= dict.fromkeys(digests, job.job_id)
            else:
                clean |= digests
        for digest, job_id in tainted.items():
            if digest not in clean:
                text = f"block {digest[:16]} of tainted job {job_id} is published"
                yield f"{text} (step {command.step})", job_id


class LoadsWaitForGate(Rule):
    """Nothing is loaded into blocks for a step before the model side has begun it."""

    name = "load-after-gate"

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen."""
        super().__init__(whole)
        #: Newest begun step, and epoch of the model side, by log and engine key.
        self._begun: dict[tuple[str, str], int] = {}
        self._epochs: dict[tuple[str, str], int] = {}

    def check(self, entry: Entry) -> Iterator[tuple[str, int | None]]:
        """Note begun steps; judge loads."""
        event = entry.event
        if isinstance(event, work.ModelSaid):
            where = (entry.log, event.engine)
            if self._epochs.setdefault(where, event.epoch) != event.epoch:
                # Another model side: its steps count from the start.
                self._epochs[where] = event.epoch
                self._begun[where] = 0
            if isinstance(event.body, (msg.StepBegun, msg.LayersComputed)):
                self._begun[where] = max(event.body.step, self._begun.get(where, 0))
        for command in entry.commands:
            if isinstance(command, work_do.LoadLayers) and entry.log in self._whole:
                begun = self._begun.get((entry.log, command.engine), 0)
                if command.step > begun:
                    text = f"op {command.op} loads into blocks for step {command.step}, but the "
                    yield f"{text}newest begun step is {begun}", None
