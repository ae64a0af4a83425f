import pytest

from kvcommon.messages import JobOutcome
from kvsched.core.jobs import Job, JobKind, Ledger
from tests.support.schedplay import hashes


def opened(ledger: Ledger, kind: JobKind, blocks: tuple[int, ...], ranks: int = 1) -> Job:
    job = Job(
        job_id=ledger.new_id(),
        kind=kind,
        step=1,
        request_id="a",
        serial=1,
        first_block=0,
        block_ids=blocks,
        block_hashes=hashes(len(blocks), str(blocks)),
        waiting=list(range(ranks)),
    )
    ledger.add(job)
    return job


def test_a_job_leaves_when_its_last_rank_has_ended() -> None:
    ledger = Ledger()
    job = opened(ledger, JobKind.SAVE, (1, 2), ranks=2)
    assert not ledger.end(job, 1, JobOutcome.FAILED)
    assert ledger.get(job.job_id) is job
    assert ledger.end(job, 0, JobOutcome.DONE)
    assert ledger.get(job.job_id) is None
    assert job.outcome is JobOutcome.FAILED
    assert (len(ledger), ledger.num_held_blocks) == (0, 0)
    ledger.validate([0, 1])


def test_ids_are_never_used_again() -> None:
    ledger = Ledger()
    first = opened(ledger, JobKind.SAVE, (1,))
    ledger.end(first, 0, JobOutcome.DONE)
    assert opened(ledger, JobKind.SAVE, (1,)).job_id > first.job_id


def test_hashes_in_open_saves_are_known() -> None:
    ledger = Ledger()
    job = opened(ledger, JobKind.SAVE, (1, 2))
    assert ledger.saver_of(job.block_hashes[1]) is job
    ledger.end(job, 0, JobOutcome.DONE)
    assert ledger.saver_of(job.block_hashes[1]) is None


def test_a_block_is_loading_until_its_last_load_has_ended() -> None:
    ledger = Ledger()
    first = opened(ledger, JobKind.ASYNC_LOAD, (1, 2))
    second = opened(ledger, JobKind.LAYERWISE_LOAD, (2, 3))
    ledger.validate([0])
    ledger.end(first, 0, JobOutcome.DONE)
    assert [ledger.is_loading(block) for block in (1, 2, 3)] == [False, True, True]
    ledger.end(second, 0, JobOutcome.DONE)
    assert not ledger.is_loading(2)
    ledger.validate([0])


def test_the_ends_that_a_dead_rank_owes() -> None:
    ledger = Ledger()
    first = opened(ledger, JobKind.SAVE, (1,), ranks=2)
    second = opened(ledger, JobKind.SAVE, (2,), ranks=2)
    ledger.end(first, 1, JobOutcome.DONE)
    assert ledger.open_on(1) == (second.job_id,)
    (end,) = ledger.lost_ends(1)
    assert (end.job_id, end.outcome, end.reason) == (
        second.job_id,
        JobOutcome.FAILED,
        "daemon-lost",
    )


@pytest.mark.parametrize("broken", ["waiting", "rank", "hash", "blocks"])
def test_validate_sees_what_is_wrong(broken: str) -> None:
    ledger = Ledger()
    job = opened(ledger, JobKind.SAVE, (1, 2))
    ledger.validate([0])
    if broken == "waiting":
        job.waiting = []
    elif broken == "rank":
        job.waiting = [5]
    elif broken == "hash":
        opened(ledger, JobKind.SAVE, (1, 2))
    else:
        job.block_ids = (1,)
    with pytest.raises(AssertionError):
        ledger.validate([0])
