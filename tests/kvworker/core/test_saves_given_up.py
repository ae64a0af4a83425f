"""Saves that are cancelled, overtaken by a reset, or left behind by a side or the store."""


from kvcommon.messages import CancelJobs, JobEnd, JobOutcome, ResetStore
from kvworker.core.commands import Cancel, ClosePuts, OpenPuts, ResetNamespace, WriteLayers
from kvworker.outcome import Outcome
from tests.support.playbook import (
    MARK,
    OBJECT_BYTES,
    Playbook,
    attach,
    ends,
    group_layout,
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


def test_cancelled_while_it_waits_for_its_step() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}), save(2, {5: 50}))
    commands = play.model(CancelJobs(job_ids=(1, 77)))
    assert kinds(commands) == ["JobsEnded → scheduler"]
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert only(play.begin(1), OpenPuts).keys == (key(50),)


def test_cancelled_in_flight_waits_for_the_terminal_event() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}))
    open_puts = only(play.begin(1), OpenPuts)
    assert play.model(CancelJobs(job_ids=(1,))) == [Cancel(op=open_puts.op)]
    assert play.model(CancelJobs(job_ids=(1,))) == []
    commands = play.answer(open_puts)
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert only(commands, ClosePuts).revoke == (key(40),)


def test_one_of_two_cancelled_does_not_stop_the_other() -> None:
    play = started()
    opened(play, save(1, {4: 40}), save(2, {5: 50}))
    write = only(play.computed(1), WriteLayers)
    assert play.model(CancelJobs(job_ids=(1,))) == []
    assert ends(play.answer(write))[1].outcome is JobOutcome.CANCELLED
    close = only(play.verdict(1), ClosePuts)
    assert (close.end, close.revoke) == ((key(50),), (key(40),))


def test_cancelled_while_nothing_is_in_flight() -> None:
    play = started()
    opened(play, save(1, {4: 40}))
    commands = play.model(CancelJobs(job_ids=(1,)))
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert only(commands, ClosePuts).revoke == (key(40),)


def test_too_late_to_cancel() -> None:
    play = started()
    written(play, save(1, {4: 40}))
    close = only(play.verdict(1), ClosePuts)
    assert play.model(CancelJobs(job_ids=(1,))) == []
    assert ends(play.answer(close))[1].outcome is JobOutcome.DONE


def test_the_model_side_is_not_told_of_saves() -> None:
    play = started()
    written(play, save(1, {4: 40}))
    assert ends(play.answer(only(play.verdict(1), ClosePuts)), "model") == {}


def test_the_store_goes_down_while_a_batch_waits_for_its_verdict() -> None:
    play = started()
    written(play, save(1, {4: 40}))
    commands = play.store_down()
    assert ends(commands)[1].reason == "store-down"
    assert only(commands, ClosePuts).revoke == (key(40),)


def test_while_the_store_is_down_saves_fail_without_asking_it() -> None:
    play = started()
    play.store_down()
    commands = play.plan(1, save(1, {4: 40}))
    assert kinds(commands) == ["PlanAck → scheduler", "JobsEnded → scheduler"]
    assert ends(commands)[1].reason == "store-down"


def test_a_reset_publishes_nothing_that_was_computed_before_it() -> None:
    play = started()
    written(play, save(1, {4: 40}))
    commands = play.scheduler(ResetStore())
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert only(commands, ClosePuts).revoke == (key(40),)
    assert "ResetNamespace" not in kinds(commands), "it would race with the revoke"


def test_a_reset_waits_for_what_is_being_published() -> None:
    play = started()
    written(play, save(1, {4: 40}))
    close = only(play.verdict(1), ClosePuts)
    assert play.scheduler(ResetStore()) == []
    commands = play.answer(close)
    assert only(commands, ResetNamespace).prefixes == (f"kvf1-{MARK}-",)


def test_with_several_groups_only_all_layers_count() -> None:
    play = Playbook()
    play.model(attach(groups=(group_layout(0, 3), group_layout(1, 2))))
    map_engine = play.log[-1][1][0]
    play.answer(map_engine)
    play.hello()
    play.plan(1, save(1, {4: 40}), save(2, {5: 50}, group=1))
    for command in play.begin(1):
        play.answer(command)
    assert play.computed(1, 4) == []
    assert [c.group for c in play.computed(1, 5) if isinstance(c, WriteLayers)] == [0, 1]


def test_a_verdict_for_a_step_without_saves_is_nothing() -> None:
    play = started()
    assert play.verdict(9, 1, 2) == []


def test_layers_of_a_step_are_remembered_for_so_many_steps() -> None:
    play = started(step_memory=2)
    play.begin(9)
    for step in (1, 2, 3):
        play.computed(step)
    opened_late = only(play.plan(1, save(1, {4: 40})), OpenPuts)
    assert play.answer(opened_late) == [], "forgotten: nothing is known to be computed"
    opened_late = only(play.plan(3, save(3, {5: 50})), OpenPuts)
    assert "WriteLayers" in kinds(play.answer(opened_late))


def test_saves_of_a_lost_scheduler_side_are_revoked_unless_judged() -> None:
    play = started()
    written(play, save(1, {4: 40}))
    opened(play, save(2, {5: 50}), step=2)
    write = only(play.computed(2), WriteLayers)
    play.answer(write)
    judged = only(play.verdict(1), ClosePuts)
    commands = play.lose("scheduler")
    assert only(commands, ClosePuts).revoke == (key(50),)
    assert ends(commands) == {}
    assert ends(play.answer(judged)) == {}
    assert ends(play.hello([1, 2])) == {
        1: JobEnd(job_id=1, outcome=JobOutcome.DONE, num_bytes=OBJECT_BYTES, duration_us=0),
        2: JobEnd(
            job_id=2,
            outcome=JobOutcome.CANCELLED,
            failed_blocks=(5,),
            num_bytes=OBJECT_BYTES,
            reason="engine-lost",
        ),
    }


def test_a_judged_save_goes_on_without_its_scheduler_side() -> None:
    play = started()
    opened(play, save(1, {4: 40}))
    play.verdict(1)
    play.lose("scheduler")
    write = only(play.computed(1), WriteLayers)
    assert only(play.answer(write), ClosePuts).end == (key(40),)
