import pytest

from kvcommon.messages import JobOutcome
from kvsched.core.commands import FreeBlocks
from tests.support.schedplay import Play, loads, new, saves


def test_blocks_are_given_back_when_the_last_rank_has_ended() -> None:
    play = Play(ranks=2)
    play.admit("a", 100, 0, range(1, 8))
    (job,) = saves(play.step(1, new("a", range(1, 8), 0, 100)))
    assert play.end(job.job_id, rank=1) == []
    assert play.core.num_held_blocks == 6
    assert play.end(job.job_id, rank=0) == [
        FreeBlocks(job_id=job.job_id, block_ids=(1, 2, 3, 4, 5, 6))
    ]
    assert play.core.counters["jobs.save.done"] == 1


def test_unknown_and_repeated_ends_are_counted_and_ignored() -> None:
    play = Play(ranks=2)
    play.admit("a", 100, 0, range(1, 8))
    (job,) = saves(play.step(1, new("a", range(1, 8), 0, 100)))
    assert play.end(99) == []
    play.end(job.job_id, rank=1)
    assert play.end(job.job_id, rank=1) == []
    assert play.end(job.job_id, rank=5) == []
    assert play.core.num_held_blocks == 6
    play.end(job.job_id, rank=0)
    assert play.end(job.job_id, rank=0) == []
    assert play.core.counters["ends_ignored"] == 4


@pytest.mark.parametrize("outcome", list(JobOutcome))
def test_a_save_that_did_not_work_is_not_repeated(outcome: JobOutcome) -> None:
    play = Play()
    play.admit("a", 100, 0, range(1, 8))
    (job,) = saves(play.step(1, new("a", range(1, 8), 0, 100)))
    play.done(1)
    play.end(job.job_id, outcome=outcome)
    assert play.core.counters[f"jobs.save.{outcome.value}"] == 1
    assert "a" not in play.core.active
    assert not play.busy()


def test_the_worst_rank_counts() -> None:
    play = Play(ranks=2)
    play.admit("a", 100, 0, range(1, 8))
    (job,) = saves(play.step(1, new("a", range(1, 8), 0, 100)))
    play.end(job.job_id, rank=0, outcome=JobOutcome.FAILED)
    play.end(job.job_id, rank=1, outcome=JobOutcome.SKIPPED)
    assert play.core.counters["jobs.save.failed"] == 1


@pytest.mark.parametrize(
    ("outcome", "failed", "barred"),
    [
        (JobOutcome.DONE, (), 0),
        (JobOutcome.DONE, (2,), 1),
        (JobOutcome.FAILED, (), 1),
        (JobOutcome.FAILED, (2,), 1),
        (JobOutcome.CANCELLED, (), 1),
        (JobOutcome.DONE, (77,), 0),
    ],
)
def test_a_load_that_failed_on_one_rank_bars_its_request(
    outcome: JobOutcome, failed: tuple[int, ...], barred: int
) -> None:
    play = Play(ranks=2, load="async")
    play.admit("a", 100, 3, range(1, 8))
    (job,) = loads(play.step(1))
    play.end(job.job_id, rank=0)
    play.end(job.job_id, rank=1, outcome=outcome, failed=failed)
    assert play.core.counters["requests_barred"] == barred
    assert play.held == {}


def test_the_end_of_a_load_does_not_touch_a_later_request_of_the_same_name() -> None:
    play = Play(load="async")
    play.admit("a", 100, 3, range(1, 8))
    (job,) = loads(play.step(1))
    play.add("a", 100)
    play.end(job.job_id, outcome=JobOutcome.FAILED)
    assert play.core.counters["requests_barred"] == 0


def test_bytes_are_counted_and_loads_are_measured() -> None:
    play = Play()
    play.admit("a", 100, 3, range(1, 8))
    commands = play.step(1, new("a", range(1, 8), 48, 52))
    play.end(loads(commands)[0].job_id, num_bytes=3000, duration_us=1000)
    play.end(saves(commands)[0].job_id, num_bytes=500, duration_us=1)
    assert play.core.counters["loaded_bytes"] == 3000
    assert play.core.counters["saved_bytes"] == 500
    assert play.core._state.worth.bandwidth == 3e6
