"""Steps in flight, and the verdict on what they saved.

A step is in flight from its plan until its output is back from all ranks. Steps finish in order.
A save may be published only if every byte that it holds was computed from right bytes; a failed
load makes wrong not only the blocks that it should have filled but all that was computed from
them, in its own step and in later steps that were already under way.
"""

from collections.abc import Container, Iterable, Iterator

import msgspec

#: Steps without jobs are kept only to measure; more of them than this are forgotten.
_MAX_WITHOUT_JOBS = 64


class SaveNote(msgspec.Struct, frozen=True, kw_only=True):
    """One save job of a step, with the block table that it was planned from."""

    job_id: int
    request_id: str
    serial: int
    #: Index in the request of the job's first block.
    first_block: int
    #: The request's list of blocks (only ever appended to) and its length at planning.
    blocks: list[int]
    num_blocks: int

    @property
    def table(self) -> list[int]:
        """The block table as of planning."""
        return self.blocks[: self.num_blocks]


class StepRecord(msgspec.Struct, kw_only=True):
    """One step in flight, or finished with jobs that are still open."""

    step: int
    planned_ns: int
    num_tokens: int
    has_loads: bool
    #: Rank → epoch of the daemons that were sent the plan.
    ranks: dict[int, int]
    saves: tuple[SaveNote, ...]
    #: Ids of all its jobs.
    jobs: tuple[int, ...] = ()
    #: Blocks of its layerwise loads that a daemon has reported as failed.
    failed_blocks: set[int] = set()
    #: Save jobs that must not be published, known before the verdict.
    tainted: dict[int, None] = {}
    finished: bool = False


class Steps:
    """Steps by number, ascending."""

    def __init__(self) -> None:
        self._steps: dict[int, StepRecord] = {}
        #: When the last step finished.
        self.finished_ns = 0

    def get(self, step: int) -> StepRecord | None:
        """Return the record of a step."""
        return self._steps.get(step)

    def __iter__(self) -> Iterator[StepRecord]:
        """Go through the steps, ascending."""
        return iter(self._steps.values())

    def add(self, record: StepRecord) -> None:
        """A step was planned."""
        self._steps[record.step] = record
        idle = [r.step for r in self if not r.jobs]
        for step in idle[:-_MAX_WITHOUT_JOBS]:
            del self._steps[step]

    def unfinished(self) -> list[StepRecord]:
        """Return the steps whose output has not come back."""
        return [record for record in self if not record.finished]

    def forget(self, is_open: Iterable[int]) -> None:
        """Drop the finished steps all of whose jobs have ended."""
        still_open = set(is_open)
        self._steps = {
            record.step: record
            for record in self
            if not record.finished or not still_open.isdisjoint(record.jobs)
        }

    def seconds(self, record: StepRecord, now_ns: int) -> int:
        """Nanoseconds that a step took on the device: it starts when the one before ends."""
        return now_ns - max(record.planned_ns, self.finished_ns)


def first_in(table: list[int], bad: Container[int]) -> int | None:
    """Return the index of the first block of ``table`` that is in ``bad``."""
    return next((index for index, block_id in enumerate(table) if block_id in bad), None)


def spoiled(bad: set[int], tables: list[list[int]]) -> set[int]:
    """Return all blocks that may hold wrong bytes when those in ``bad`` do.

    Everything after a bad block of a table was computed from it; and what it was computed into may
    stand in another request's table. Block 0, the null block, holds nothing.
    """
    spoilt = bad - {0}
    grown = bool(spoilt)
    while grown:
        grown = False
        for table in tables:
            first = first_in(table, spoilt)
            if first is not None and not spoilt.issuperset(set(table[first:]) - {0}):
                spoilt.update(table[first:])
                spoilt.discard(0)
                grown = True
    return spoilt
