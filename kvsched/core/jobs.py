"""The ledger of jobs: which rank still owes an end, and which blocks are referenced.

A job is open until every rank has ended it; while it is open vLLM's block pool holds one
reference per entry of ``block_ids`` for it (rule 1). It leaves the ledger exactly once.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from kvcommon.messages import JobEnd, JobOutcome
from kvcommon.reasons import DAEMON_LOST

#: Of the ends on several ranks the worst one counts.
_BADNESS = {
    JobOutcome.DONE: 0,
    JobOutcome.SKIPPED: 1,
    JobOutcome.CANCELLED: 2,
    JobOutcome.FAILED: 3,
}


class JobKind(str, enum.Enum):
    """Direction of a job, and for loads whether a step waits for it."""

    SAVE = "save"
    LAYERWISE_LOAD = "layerwise_load"
    ASYNC_LOAD = "async_load"


class Job(msgspec.Struct, kw_only=True):
    """One open job."""

    job_id: int
    kind: JobKind
    step: int
    request_id: str
    serial: int
    #: Index in the request of the first block.
    first_block: int
    block_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    #: Ranks that have not ended it, ascending.
    waiting: list[int]
    #: Worst end so far.
    outcome: JobOutcome = JobOutcome.DONE
    #: Saves: its bytes may be wrong, so it is or will be revoked.
    tainted: bool = False

    @property
    def is_save(self) -> bool:
        """It writes to the store."""
        return self.kind is JobKind.SAVE


class Ledger:
    """All open jobs, in the order of planning."""

    def __init__(self) -> None:
        self._open: dict[int, Job] = {}
        self._next_id = 1
        #: References held for open jobs.
        self.num_held_blocks = 0
        #: Hash → open save job; no hash is in two of them.
        self._saving: dict[bytes, Job] = {}
        #: Block id → number of open loads that write it.
        self._loading: Counter[int] = Counter()

    def new_id(self) -> int:
        """Draw a job id, never used again."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, job: Job) -> None:
        """Open a job."""
        self._open[job.job_id] = job
        self.num_held_blocks += len(job.block_ids)
        if job.is_save:
            for block_hash in job.block_hashes:
                self._saving[block_hash] = job
        else:
            self._loading.update(job.block_ids)

    def get(self, job_id: int) -> Job | None:
        """Return an open job."""
        return self._open.get(job_id)

    def __len__(self) -> int:
        """Return the number of open jobs."""
        return len(self._open)

    def __iter__(self) -> Iterator[Job]:
        """Go through the open jobs in the order of planning."""
        return iter(self._open.values())

    def saver_of(self, block_hash: bytes) -> Job | None:
        """Return the open save job that holds this hash."""
        return self._saving.get(block_hash)

    def is_loading(self, block_id: int) -> bool:
        """An open load writes this block."""
        return block_id in self._loading

    def end(self, job: Job, rank: int, outcome: JobOutcome) -> bool:
        """Note the end of an open job on one rank; return whether that was the last.

        The caller has made sure that ``rank`` is in ``job.waiting``.
        """
        job.waiting.remove(rank)
        if _BADNESS[outcome] > _BADNESS[job.outcome]:
            job.outcome = outcome
        if job.waiting:
            return False
        del self._open[job.job_id]
        self.num_held_blocks -= len(job.block_ids)
        if job.is_save:
            for block_hash in job.block_hashes:
                del self._saving[block_hash]
        else:
            self._loading.subtract(job.block_ids)
            for block_id in job.block_ids:
                if not self._loading[block_id]:
                    del self._loading[block_id]
        return True

    def lost_ends(self, rank: int) -> tuple[JobEnd, ...]:
        """Return the ends of all jobs that a rank will never report: its daemon is gone."""
        return tuple(
            JobEnd(job_id=job.job_id, outcome=JobOutcome.FAILED, reason=DAEMON_LOST)
            for job in self
            if rank in job.waiting
        )

    def open_on(self, rank: int) -> tuple[int, ...]:
        """Return the ids of the jobs that a rank has not ended."""
        return tuple(job.job_id for job in self if rank in job.waiting)

    def validate(self, ranks: Iterable[int]) -> None:
        """Assert that the derived counts agree with the open jobs."""
        known = set(ranks)
        held = 0
        saving: dict[bytes, int] = {}
        loading: Counter[int] = Counter()
        for job_id, job in self._open.items():
            assert job.job_id == job_id < self._next_id, job
            assert job.waiting, f"job {job_id} has ended but is open"
            assert job.waiting == sorted(set(job.waiting)), job
            assert known.issuperset(job.waiting), job
            assert len(job.block_ids) == len(job.block_hashes) > 0, job
            held += len(job.block_ids)
            if job.is_save:
                for block_hash in job.block_hashes:
                    assert block_hash not in saving, f"{block_hash.hex()} saved twice at once"
                    saving[block_hash] = job_id
            else:
                loading.update(job.block_ids)
        assert held == self.num_held_blocks, (held, self.num_held_blocks)
        assert saving == {h: job.job_id for h, job in self._saving.items()}
        assert loading == self._loading
