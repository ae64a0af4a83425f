"""Jobs: one record each, one door by which they come and one by which they go."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcommon.messages import JobEnd, JobOutcome, JobsEnded
from kvworker.core.engines import Engine
from kvworker.core.kernel import Kernel
from kvworker.core.states import BlockState, JobState, moved

#: Block states from which a block can still become done.
LIVE = (BlockState.WAITING, BlockState.OPENING, BlockState.OPEN)
_SETTLED_WELL = (BlockState.DONE, BlockState.SKIPPED)


class JobKey(NamedTuple):
    """Names a job for ever: ids are unique within a scheduler side's incarnation."""

    engine: str
    #: Of the scheduler side that planned it.
    epoch: int
    job_id: int


@dataclass(eq=False)
class Block:
    """One block of a job and its object in the store."""

    block_id: int
    key: str
    state: BlockState = BlockState.WAITING
    #: Saves: layers ``[0, num_layers)`` are in the open put session.
    num_layers: int = 0
    num_bytes: int = 0
    #: Saves: a put session of this daemon is open under the key, because of this block.
    held: bool = False
    #: Why it failed or was skipped.
    reason: str = ""

    def move(self, to: BlockState, reason: str = "") -> None:
        """Change state; ``reason`` says why it failed or was skipped."""
        self.state = moved(self.key, self.state, to)
        self.reason = reason


@dataclass(eq=False)
class Job:
    """One load or save of one request on this rank."""

    key: JobKey
    engine: Engine
    #: ``save`` or ``load``.
    kind: str
    request_id: str
    step: int
    group: int
    blocks: tuple[Block, ...]
    #: Incarnation of the rank's memory that it was planned for.
    incarnation: int
    #: Loads only.
    layerwise: bool = False
    #: Saves only: all layers are readable once the step has begun.
    computed: bool = False
    state: JobState = JobState.OPEN
    #: Why it was given up.
    reason: str = ""
    #: Monotonic time of the first and last byte; 0: none moved.
    first_ns: int = 0
    last_ns: int = 0

    @property
    def name(self) -> str:
        """For errors."""
        return f"{self.kind} job {self.key.job_id} of {self.key.engine}"

    def cancel(self, reason: str) -> None:
        """Mark as given up; the first reason counts."""
        if self.state is JobState.OPEN:
            self.state = moved(self.name, self.state, JobState.CANCELLING)
            self.reason = reason

    def live(self) -> Iterator[Block]:
        """Yield the blocks that can still become done."""
        return (block for block in self.blocks if block.state in LIVE)

    def moved_bytes(self, started_ns: int, now_ns: int) -> None:
        """Note that bytes moved between these times."""
        self.first_ns = self.first_ns or started_ns or now_ns
        self.last_ns = max(self.last_ns, now_ns)

    def result(self) -> JobEnd:
        """Say how the job ended, from its blocks, none of which is live."""
        bad = [block for block in self.blocks if block.state not in _SETTLED_WELL]
        reason = ""
        if not bad:
            done = any(block.state is BlockState.DONE for block in self.blocks)
            outcome = JobOutcome.DONE if done or self.kind == "load" else JobOutcome.SKIPPED
            if outcome is JobOutcome.SKIPPED and self.blocks:
                reason = self.blocks[0].reason
        elif self.state is JobState.CANCELLING:
            outcome, reason = JobOutcome.CANCELLED, self.reason
        else:
            failed = [block for block in bad if block.state is BlockState.FAILED]
            outcome = JobOutcome.FAILED if failed else JobOutcome.CANCELLED
            reason = (failed or bad)[0].reason
        return JobEnd(
            job_id=self.key.job_id,
            outcome=outcome,
            failed_blocks=tuple(block.block_id for block in bad),
            num_bytes=sum(block.num_bytes for block in self.blocks),
            duration_us=max(0, self.last_ns - self.first_ns) // 1000,
            reason=reason,
        )


class EndedJob(NamedTuple):
    """What is remembered of a job."""

    end: JobEnd
    kind: str
    request_id: str
    step: int
    num_blocks: int
    ended_ns: int


@dataclass
class _Reports:
    """Ends of the event at hand, by (engine, step), for both sides."""

    model: dict[tuple[str, int], list[JobEnd]] = field(default_factory=dict)
    scheduler: dict[tuple[str, int], list[JobEnd]] = field(default_factory=dict)


class Part(NamedTuple):
    """A block and its job."""

    job: Job
    block: Block


class JobBook:
    """All open jobs, and the last that ended."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.open: dict[JobKey, Job] = {}
        #: Oldest first.
        self.ended: OrderedDict[JobKey, EndedJob] = OrderedDict()
        self._reports = _Reports()

    def knows(self, key: JobKey) -> bool:
        """Say whether a job of this name is open or ended not long ago."""
        return key in self.open or key in self.ended

    def admit(self, job: Job) -> None:
        """Take in a new job."""
        assert not self.knows(job.key), job.name
        self.open[job.key] = job

    def end(self, job: Job) -> None:
        """End an open job, none of whose blocks is live: report it where it belongs."""
        assert not any(True for _ in job.live()), job.name
        end = job.result()
        job.state = moved(job.name, job.state, JobState.ENDED)
        del self.open[job.key]
        self._remember(job.key, end, job)
        self._tally(job, end)
        where = (job.key.engine, job.step)
        if job.key.epoch == job.engine.scheduler_epoch:
            self._reports.scheduler.setdefault(where, []).append(end)
        # Layerwise ones too: where the page says "failed", only that tells which blocks.
        if job.kind == "load" and job.engine.attached and job.incarnation == job.engine.incarnation:
            self._reports.model.setdefault(where, []).append(end)

    def refuse(self, job: Job, reason: str) -> None:
        """Take in a new job and end it at once as failed."""
        self.admit(job)
        for block in job.blocks:
            block.move(BlockState.FAILED, reason)
        self.end(job)

    def report_again(self, engine: Engine, job_ids: Sequence[int], reason: str) -> None:
        """Tell the scheduler side how the jobs ended that it believes open.

        Those that are open are left alone; one that nobody knows ends as failed, for ``reason``.
        """
        keys = [JobKey(engine.key, engine.scheduler_epoch, each) for each in dict.fromkeys(job_ids)]
        again = [(self.ended[key].step, self.ended[key].end) for key in keys if key in self.ended]
        for key in [key for key in keys if not self.knows(key)]:
            end = JobEnd(job_id=key.job_id, outcome=JobOutcome.FAILED, reason=reason)
            self._remember(key, end, None)
            again.append((0, end))
        for step, end in again:
            self._reports.scheduler.setdefault((engine.key, step), []).append(end)

    def flush(self) -> None:
        """Send what ended during the event at hand."""
        reports, self._reports = self._reports, _Reports()
        for (engine, step), ends in reports.model.items():
            self._kernel.to_model(engine, JobsEnded(step=step, ends=tuple(ends)))
        for (engine, step), ends in reports.scheduler.items():
            self._kernel.to_scheduler(engine, JobsEnded(step=step, ends=tuple(ends)))

    def _remember(self, key: JobKey, end: JobEnd, job: Job | None) -> None:
        """Keep the end, and forget the oldest beyond the bound."""
        self.ended[key] = EndedJob(
            end=end,
            kind=job.kind if job else "",
            request_id=job.request_id if job else "",
            step=job.step if job else 0,
            num_blocks=len(job.blocks) if job else 0,
            ended_ns=self._kernel.now_ns,
        )
        if len(self.ended) > self._kernel.config.ended_memory:
            self.ended.popitem(last=False)

    def _tally(self, job: Job, end: JobEnd) -> None:
        """Count the end."""
        kind, count = job.kind, self._kernel.count
        count("jobs_ended", kind=kind, outcome=end.outcome.value, reason=end.reason)
        if end.num_bytes:
            count("bytes", end.num_bytes, kind=kind)
        for block in job.blocks:
            count("blocks", kind=kind, outcome=block.state.value)
        totals = job.engine.totals
        totals[f"{kind}_jobs"] = totals.get(f"{kind}_jobs", 0) + 1
        done = sum(block.state is BlockState.DONE for block in job.blocks)
        totals[f"{kind}_blocks"] = totals.get(f"{kind}_blocks", 0) + done
        totals[f"{kind}_bytes"] = totals.get(f"{kind}_bytes", 0) + end.num_bytes
