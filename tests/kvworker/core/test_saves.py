"""Saves: opened after the step began, written as layers come, published after the verdict."""

import pytest

from kvcommon.messages import JobEnd, JobOutcome
from kvworker.core.commands import Cancel, ClosePuts, OpenPuts, WriteLayers
from kvworker.outcome import Outcome
from tests.support.playbook import (
    LAYER_BYTES,
    OBJECT_BYTES,
    Playbook,
    ends,
    key,
    kinds,
    only,
    save,
    started,
)

OK, DOWN, EXISTS, FAILED = Outcome.OK, Outcome.DOWN, Outcome.EXISTS, Outcome.FAILED


def opened(play: Playbook, *jobs: object, step: int = 1) -> None:
    """Plan saves and open their sessions."""
    play.plan(step, *jobs)  # type: ignore[arg-type]
    play.answer(only(play.begin(step), OpenPuts))


def written(play: Playbook, *jobs: object, step: int = 1) -> None:
    """Plan saves and write all of them."""
    opened(play, *jobs, step=step)
    play.answer(only(play.computed(step), WriteLayers))


def test_one_save_from_plan_to_end() -> None:
    play = started()
    assert kinds(play.plan(1, save(1, {4: 40, 5: 50}))) == ["PlanAck → scheduler"]
    open_puts = only(play.begin(1), OpenPuts)
    assert open_puts.keys == (key(40), key(50))
    assert (open_puts.step, open_puts.group) == (1, 0)
    assert kinds(play.answer(open_puts)) == []
    write = only(play.computed(1, 2), WriteLayers)
    assert (write.first_layer, write.end_layer) == (0, 2)
    assert (write.keys, write.block_ids) == ((key(40), key(50)), (4, 5))
    assert kinds(play.answer(write, started_ns=play.now_ns)) == []
    write = only(play.computed(1, 3), WriteLayers)
    assert (write.first_layer, write.end_layer) == (2, 3)
    play.answer(write)
    close = only(play.verdict(1), ClosePuts)
    assert (close.end, close.revoke) == ((key(40), key(50)), ())
    end = ends(play.answer(close))[1]
    assert end.outcome is JobOutcome.DONE
    assert end.num_bytes == 2 * OBJECT_BYTES
    assert end.duration_us > 0
    assert (end.failed_blocks, end.reason) == ((), "")


def test_a_step_that_began_before_its_plan_came() -> None:
    play = started()
    play.begin(1)
    play.computed(1)
    open_puts = only(play.plan(1, save(1, {4: 40})), OpenPuts)
    write = only(play.answer(open_puts), WriteLayers)
    assert (write.first_layer, write.end_layer) == (0, 3)


def test_a_later_step_begun_implies_the_earlier() -> None:
    play = started()
    play.begin(7)
    assert "OpenPuts" in kinds(play.plan(3, save(1, {4: 40})))


def test_what_became_ready_during_a_write_goes_out_in_one() -> None:
    play = started()
    opened(play, save(1, {4: 40}))
    write = only(play.computed(1, 1), WriteLayers)
    assert play.computed(1, 2) == []
    assert play.computed(1, 3) == []
    write = only(play.answer(write), WriteLayers)
    assert (write.first_layer, write.end_layer) == (1, 3)


def test_blocks_computed_earlier_are_written_as_soon_as_the_step_has_begun() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}), save(2, {5: 50}, computed=True))
    write = only(play.answer(only(play.begin(1), OpenPuts)), WriteLayers)
    assert (write.keys, write.end_layer) == ((key(50),), 3)
    assert play.answer(write) == []
    write = only(play.computed(1), WriteLayers)
    assert write.keys == (key(40),)
    play.answer(write)
    assert only(play.verdict(1), ClosePuts).end == (key(40), key(50))


def test_the_verdict_may_come_before_the_last_layers_are_written() -> None:
    play = started()
    opened(play, save(1, {4: 40}))
    write = only(play.computed(1), WriteLayers)
    assert play.verdict(1) == []
    close = only(play.answer(write), ClosePuts)
    assert close.end == (key(40),)
    assert ends(play.answer(close))[1].outcome is JobOutcome.DONE


def test_the_verdict_may_come_before_the_layers_are_reported_computed() -> None:
    play = started()
    opened(play, save(1, {4: 40}))
    assert play.verdict(1) == []
    write = only(play.computed(1), WriteLayers)
    assert only(play.answer(write), ClosePuts).end == (key(40),)


def test_layers_that_never_come_are_not_waited_for_once_the_next_step_began() -> None:
    play = started()
    opened(play, save(1, {4: 40}), save(2, {5: 50}, computed=True))
    play.answer(only_write(play))
    play.computed(1, 2)
    play.answer(only_write(play))
    assert play.verdict(1) == []
    close = only(play.begin(2), ClosePuts)
    assert (close.end, close.revoke) == ((key(50),), (key(40),))
    told = ends(play.answer(close))
    assert told[1] == JobEnd(
        job_id=1,
        outcome=JobOutcome.FAILED,
        failed_blocks=(4,),
        num_bytes=2 * LAYER_BYTES,
        reason="late",
    )
    assert told[2].outcome is JobOutcome.DONE


def only_write(play: Playbook) -> WriteLayers:
    """The last ``WriteLayers`` that was asked for."""
    return next(
        c for _, commands in reversed(play.log) for c in commands if isinstance(c, WriteLayers)
    )


def test_layers_that_never_come_are_waited_for_no_longer_than_the_grace() -> None:
    play = started(verdict_grace_ms=500)
    opened(play, save(1, {4: 40}))
    play.verdict(1)
    assert play.tick(400) == []
    close = only(play.tick(200), ClosePuts)
    assert close.revoke == (key(40),)
    assert ends(play.answer(close))[1].reason == "late"


def test_a_step_that_never_begins_ends_its_saves_after_the_grace() -> None:
    play = started(verdict_grace_ms=500)
    play.plan(1, save(1, {4: 40}, computed=True))
    play.verdict(1)
    commands = play.tick(600)
    assert kinds(commands) == ["JobsEnded → scheduler"]
    assert ends(commands)[1].outcome is JobOutcome.FAILED


def test_the_verdict_of_an_older_step_whose_batch_waits() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}))
    play.plan(2, save(2, {5: 50}))
    assert play.verdict(1) == []
    first = only(play.begin(1), OpenPuts)
    assert first.keys == (key(40),)
    write = only(play.computed(1), WriteLayers) if play.answer(first) == [] else None
    assert write is not None
    close = only(play.answer(write), ClosePuts)
    assert close.end == (key(40),)


def test_tainted_jobs_are_revoked_and_end_as_cancelled() -> None:
    play = started()
    written(play, save(1, {4: 40}), save(2, {5: 50}))
    commands = play.verdict(1, 1)
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert ends(commands)[1].reason == "tainted"
    close = only(commands, ClosePuts)
    assert (close.end, close.revoke) == ((key(50),), (key(40),))
    assert list(ends(play.answer(close))) == [2]


def test_a_tainted_job_in_flight_ends_when_the_write_answers() -> None:
    play = started()
    opened(play, save(1, {4: 40}))
    write = only(play.computed(1), WriteLayers)
    commands = play.verdict(1, 1)
    assert commands == [Cancel(op=write.op)]
    commands = play.answer(write, Outcome.CANCELLED)
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert only(commands, ClosePuts).revoke == (key(40),)


def test_stored_blocks_are_skipped() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}))
    commands = play.answer(only(play.begin(1), OpenPuts), EXISTS)
    assert kinds(commands) == ["JobsEnded → scheduler"]
    assert ends(commands)[1] == JobEnd(job_id=1, outcome=JobOutcome.SKIPPED, reason="exists")
    assert play.verdict(1) == []


def test_a_job_of_which_some_blocks_are_stored_is_done() -> None:
    play = started()
    play.plan(1, save(1, {4: 40, 5: 50}))
    play.answer(only(play.begin(1), OpenPuts), [EXISTS, OK])
    play.answer(only(play.computed(1), WriteLayers))
    close = only(play.verdict(1), ClosePuts)
    assert close.end == (key(50),)
    assert ends(play.answer(close))[1].outcome is JobOutcome.DONE


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [(Outcome.FULL, "store-full"), (DOWN, "store-down"), (FAILED, "transfer-failed")],
)
def test_nothing_could_be_opened(outcome: Outcome, reason: str) -> None:
    play = started()
    play.plan(1, save(1, {4: 40, 5: 50}))
    commands = play.answer(only(play.begin(1), OpenPuts), outcome)
    assert kinds(commands) == ["JobsEnded → scheduler"]
    end = ends(commands)[1]
    assert (end.outcome, end.failed_blocks, end.reason) == (JobOutcome.FAILED, (4, 5), reason)


def test_a_key_that_another_batch_has_open_is_skipped() -> None:
    play = started()
    opened(play, save(1, {4: 40}))
    play.plan(2, save(2, {5: 40}))
    commands = play.begin(2)
    assert ends(commands)[2] == JobEnd(job_id=2, outcome=JobOutcome.SKIPPED, reason="exists")


def test_a_key_is_taken_until_its_close_has_answered() -> None:
    play = started()
    written(play, save(1, {4: 40}))
    close = only(play.verdict(1, 1), ClosePuts)
    play.begin(2)
    assert ends(play.plan(2, save(2, {5: 40})))[2].outcome is JobOutcome.SKIPPED
    play.answer(close)
    assert only(play.plan(2, save(3, {6: 40})), OpenPuts).keys == (key(40),)


def test_a_key_twice_in_one_batch_is_written_once() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}), save(2, {5: 40}))
    commands = play.begin(1)
    assert only(commands, OpenPuts).keys == (key(40),)
    assert ends(commands)[2].outcome is JobOutcome.SKIPPED


def test_a_failed_write_is_never_published() -> None:
    play = started()
    opened(play, save(1, {4: 40, 5: 50}))
    play.answer(only(play.computed(1), WriteLayers), [OK, FAILED])
    close = only(play.verdict(1), ClosePuts)
    assert (close.end, close.revoke) == ((key(40),), (key(50),))
    end = ends(play.answer(close))[1]
    assert (end.outcome, end.failed_blocks) == (JobOutcome.FAILED, (5,))


def test_a_short_write_is_never_published() -> None:
    play = started()
    opened(play, save(1, {4: 40, 5: 50}))
    whole = 3 * LAYER_BYTES
    play.answer(only(play.computed(1), WriteLayers), num_bytes=(whole, whole - 1))
    close = only(play.verdict(1), ClosePuts)
    assert (close.end, close.revoke) == ((key(40),), (key(50),))
    assert ends(play.answer(close))[1].failed_blocks == (5,)


def test_a_batch_that_failed_altogether_does_not_wait_for_its_verdict() -> None:
    play = started()
    opened(play, save(1, {4: 40}))
    commands = play.answer(only(play.computed(1), WriteLayers), FAILED)
    assert ends(commands)[1].outcome is JobOutcome.FAILED
    assert only(commands, ClosePuts).revoke == (key(40),)


@pytest.mark.parametrize(
    ("outcome", "ended", "reason"),
    [
        (DOWN, JobOutcome.FAILED, "store-down"),
        (EXISTS, JobOutcome.SKIPPED, "exists"),
        (FAILED, JobOutcome.FAILED, "transfer-failed"),
    ],
)
def test_the_store_does_not_publish(outcome: Outcome, ended: JobOutcome, reason: str) -> None:
    play = started()
    written(play, save(1, {4: 40}))
    end = ends(play.answer(only(play.verdict(1), ClosePuts), outcome))[1]
    assert (end.outcome, end.reason) == (ended, reason)
