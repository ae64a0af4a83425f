"""Jobs: how an end is told from its blocks, and the one door out."""

import pytest

from kvcommon.errors import LocalProtocolError
from kvcommon.messages import JobOutcome
from kvworker.core.config import CoreConfig
from kvworker.core.engines import Engine, Progress
from kvworker.core.jobs import Block, Job, JobBook, JobKey
from kvworker.core.kernel import Kernel
from kvworker.core.states import BlockState, JobState
from tests.support.playbook import ends

DONE, SKIPPED, FAILED, CANCELLED = (
    BlockState.DONE,
    BlockState.SKIPPED,
    BlockState.FAILED,
    BlockState.CANCELLED,
)


def job(kind: str, *states: BlockState, job_id: int = 1) -> Job:
    engine = Engine(key="e#0", progress=Progress(memory=1), scheduler_epoch=5)
    blocks = tuple(
        Block(block_id=10 + i, key=f"k{i}", state=state, reason=f"why-{state.value}")
        for i, state in enumerate(states)
    )
    return Job(
        key=JobKey("e#0", 5, job_id),
        engine=engine,
        kind=kind,
        request_id="r",
        step=1,
        group=0,
        blocks=blocks,
        incarnation=0,
    )


@pytest.mark.parametrize(
    ("kind", "states", "outcome", "reason", "failed"),
    [
        ("save", (DONE, DONE), JobOutcome.DONE, "", ()),
        ("save", (DONE, SKIPPED), JobOutcome.DONE, "", ()),
        ("save", (SKIPPED, SKIPPED), JobOutcome.SKIPPED, "why-skipped", ()),
        ("save", (), JobOutcome.SKIPPED, "", ()),
        ("load", (), JobOutcome.DONE, "", ()),
        ("save", (SKIPPED, FAILED), JobOutcome.FAILED, "why-failed", (11,)),
        ("load", (CANCELLED, FAILED), JobOutcome.FAILED, "why-failed", (10, 11)),
        ("load", (DONE, CANCELLED), JobOutcome.CANCELLED, "why-cancelled", (11,)),
    ],
)
def test_how_it_ended(
    kind: str,
    states: tuple[BlockState, ...],
    outcome: JobOutcome,
    reason: str,
    failed: tuple[int, ...],
) -> None:
    end = job(kind, *states).result()
    assert (end.outcome, end.reason, end.failed_blocks) == (outcome, reason, failed)


def test_a_job_that_was_given_up_ends_so_unless_it_was_done() -> None:
    given_up = job("load", DONE, FAILED)
    given_up.cancel("first")
    given_up.cancel("second")
    assert (given_up.result().outcome, given_up.result().reason) == (JobOutcome.CANCELLED, "first")
    done = job("load", DONE)
    done.cancel("too late")
    assert done.result().outcome is JobOutcome.DONE


def test_duration_is_from_the_first_to_the_last_byte() -> None:
    moving = job("load", DONE)
    assert moving.result().duration_us == 0
    moving.moved_bytes(1_000_000, 3_000_000)
    moving.moved_bytes(4_000_000, 9_000_000)
    assert moving.result().duration_us == 8000


def book() -> tuple[JobBook, Kernel]:
    kernel = Kernel(CoreConfig(device="cpu:0", store="memory", ended_memory=2))
    return JobBook(kernel), kernel


def test_a_job_ends_once() -> None:
    jobs, kernel = book()
    one = job("save", DONE)
    jobs.admit(one)
    jobs.end(one)
    with pytest.raises(LocalProtocolError, match="save job 1 of e#0"):
        jobs.end(one)
    jobs.flush()
    assert list(ends(kernel.out)) == [1]
    kernel.out = []
    jobs.flush()
    assert kernel.out == []


def test_a_job_is_admitted_once() -> None:
    jobs, _ = book()
    jobs.admit(job("save", DONE))
    with pytest.raises(AssertionError):
        jobs.admit(job("save", DONE))


def test_a_job_with_live_blocks_cannot_end() -> None:
    jobs, _ = book()
    one = job("save", BlockState.OPEN)
    jobs.admit(one)
    with pytest.raises(AssertionError, match="save job 1"):
        jobs.end(one)
    assert one.state is JobState.OPEN


def test_ends_of_one_event_and_step_are_one_message() -> None:
    jobs, kernel = book()
    for number in (1, 2):
        one = job("save", DONE, job_id=number)
        jobs.admit(one)
        jobs.end(one)
    jobs.flush()
    assert len(kernel.out) == 1
    assert list(ends(kernel.out)) == [1, 2]


def test_what_ended_long_ago_is_forgotten() -> None:
    jobs, _ = book()
    for number in (1, 2, 3):
        jobs.refuse(job("save", BlockState.WAITING, job_id=number), "why")
    assert [key.job_id for key in jobs.ended] == [2, 3]
    assert not jobs.knows(JobKey("e#0", 5, 1))
    assert jobs.knows(JobKey("e#0", 5, 3))
