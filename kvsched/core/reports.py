"""The ends of jobs, as daemons report them or as their death implies."""

from kvcommon.messages import JobEnd, JobOutcome
from kvsched.core.commands import FreeBlocks, SchedCommand
from kvsched.core.jobs import Job, JobKind
from kvsched.core.state import CoreState


class Reporter:
    """Keeps the ledger of jobs up to date."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def ended(self, rank: int, ends: tuple[JobEnd, ...]) -> list[SchedCommand]:
        """Jobs ended on one rank. Blocks whose job has ended on every rank are given back.

        An end of an unknown job, or a second end on the same rank, is counted and ignored.
        """
        commands: list[SchedCommand] = []
        for end in ends:
            job = self._state.ledger.get(end.job_id)
            if job is None or rank not in job.waiting:
                self._state.counters["ends_ignored"] += 1
                continue
            self._measure(job, end)
            failed = _failed_blocks(job, end)
            if failed:
                self._load_failed(job, failed)
            if self._state.ledger.end(job, rank, end.outcome):
                commands.append(FreeBlocks(job_id=job.job_id, block_ids=job.block_ids))
                self._closed(job)
        return commands

    def rank_gone(self, rank: int) -> list[SchedCommand]:
        """The process behind a rank's daemon is gone: it will never touch a block again."""
        return self.ended(rank, self._state.ledger.lost_ends(rank))

    def _measure(self, job: Job, end: JobEnd) -> None:
        direction = "saved" if job.is_save else "loaded"
        self._state.counters[f"{direction}_bytes"] += end.num_bytes
        if not job.is_save and end.outcome is JobOutcome.DONE:
            self._state.worth.load_measured(end.num_bytes, end.duration_us)

    def _load_failed(self, job: Job, failed: tuple[int, ...]) -> None:
        """Never load for this request again, and publish nothing that the load fed."""
        first = min(job.block_ids.index(block_id) for block_id in failed)
        record = self._state.find(job.request_id, job.serial)
        if record is not None:
            self._state.bar(record, job.first_block + first)
        step = self._state.steps.get(job.step)
        if step is not None and job.kind is JobKind.LAYERWISE_LOAD:
            step.failed_blocks.update(failed)

    def _closed(self, job: Job) -> None:
        """A job has ended on every rank."""
        self._state.counters[f"jobs.{job.kind.value}.{job.outcome.value}"] += 1
        self._state.cancel.pop(job.job_id, None)
        record = self._state.find(job.request_id, job.serial)
        if record is not None and record.async_job == job.job_id:
            record.async_job = 0


def _failed_blocks(job: Job, end: JobEnd) -> tuple[int, ...]:
    """Return the blocks of a load that do not hold what was asked for."""
    if job.is_save:
        return ()
    named = tuple(block_id for block_id in end.failed_blocks if block_id in job.block_ids)
    if named or end.outcome in {JobOutcome.DONE, JobOutcome.SKIPPED}:
        return named
    return job.block_ids
