"""Loads: opened at once, read after the gate, every end told to whom it concerns."""

import pytest

from kvcommon.messages import CancelJobs, JobEnd, JobOutcome
from kvworker.core.commands import Cancel, CloseGets, LoadLayers, OpenGets, PublishProgress
from kvworker.outcome import Outcome
from tests.support.playbook import (
    ENGINE,
    OBJECT_BYTES,
    Playbook,
    attach,
    ends,
    group_layout,
    key,
    kinds,
    load,
    only,
    started,
)

OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED


def failed_page(step: int = 1, num_layers: int = 3) -> PublishProgress:
    """The page says: go on, something is missing."""
    return PublishProgress(engine=ENGINE, step=step, num_layers=num_layers, failed=True)


def test_one_layerwise_load_from_plan_to_end() -> None:
    play = started()
    commands = play.plan(1, load(1, {4: 40, 5: 50}, layerwise=True))
    assert kinds(commands) == ["PlanAck → scheduler", "OpenGets"]
    gets = only(commands, OpenGets)
    assert (gets.keys, gets.step) == ((key(40), key(50)), 1)
    assert play.answer(gets) == [], "opened, but the gate is closed"
    loading = only(play.begin(1), LoadLayers)
    assert (loading.keys, loading.block_ids) == ((key(40), key(50)), (4, 5))
    assert (loading.first_layer, loading.end_layer) == (0, 3)
    assert (loading.publish, loading.tainted) == (True, False)
    commands = play.answer(loading, started_ns=play.now_ns)
    assert kinds(commands) == ["CloseGets", "JobsEnded → model", "JobsEnded → scheduler"]
    end = ends(commands)[1]
    assert (end.outcome, end.num_bytes) == (JobOutcome.DONE, 2 * OBJECT_BYTES)
    assert end.duration_us > 0
    closing = only(commands, CloseGets)
    assert closing.keys == (key(40), key(50))
    assert play.answer(closing) == []


def test_the_gate_may_open_first() -> None:
    play = started()
    play.begin(1)
    gets = only(play.plan(1, load(1, {4: 40}, layerwise=True)), OpenGets)
    assert "LoadLayers" in kinds(play.answer(gets))


def test_a_later_step_begun_opens_the_gate_and_an_earlier_does_not() -> None:
    play = started()
    play.answer(only(play.plan(5, load(1, {4: 40})), OpenGets))
    assert play.begin(4) == []
    assert kinds(play.begin(6)) == ["LoadLayers"]


def test_an_asynchronous_load_is_reported_to_both_sides() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40})), OpenGets))
    loading = only(play.begin(1), LoadLayers)
    assert not loading.publish
    commands = play.answer(loading)
    assert kinds(commands) == ["CloseGets", "JobsEnded → model", "JobsEnded → scheduler"]
    assert ends(commands, "model") == ends(commands)


def test_the_model_side_hears_of_every_layerwise_load_of_a_step_that_failed() -> None:
    play = started()
    jobs = (load(1, {4: 40}, layerwise=True), load(2, {5: 50}, layerwise=True))
    play.answer(only(play.plan(1, *jobs), OpenGets))
    commands = play.answer(only(play.begin(1), LoadLayers), [OK, FAILED])
    assert list(ends(commands)) == [1, 2]
    # Both: it cannot know which of them the page's "failed" means.
    assert ends(commands, "model") == ends(commands)
    assert ends(commands)[2] == JobEnd(
        job_id=2, outcome=JobOutcome.FAILED, failed_blocks=(5,), reason="transfer-failed"
    )


def test_layerwise_and_asynchronous_loads_are_two_batches() -> None:
    play = started()
    commands = play.plan(1, load(1, {4: 40}, layerwise=True), load(2, {5: 50}))
    gets = [c for c in commands if isinstance(c, OpenGets)]
    assert [c.keys for c in gets] == [(key(40),), (key(50),)]
    for command in gets:
        play.answer(command)
    assert [c.publish for c in play.begin(1) if isinstance(c, LoadLayers)] == [True, False]


def test_missing_blocks_fail_and_the_others_are_loaded() -> None:
    play = started()
    gets = only(play.plan(1, load(1, {4: 40, 5: 50, 6: 60}, layerwise=True)), OpenGets)
    assert play.answer(gets, [OK, MISS, OK]) == []
    loading = only(play.begin(1), LoadLayers)
    assert loading.keys == (key(40), key(60))
    assert loading.tainted
    commands = play.answer(loading)
    end = ends(commands)[1]
    assert (end.outcome, end.failed_blocks, end.reason) == (JobOutcome.FAILED, (5,), "evicted")
    assert end.num_bytes == 2 * OBJECT_BYTES
    assert only(commands, CloseGets).keys == (key(40), key(60))


def test_nothing_can_be_loaded_for_the_step() -> None:
    play = started()
    gets = only(play.plan(1, load(1, {4: 40, 5: 50}, layerwise=True)), OpenGets)
    commands = play.answer(gets, MISS)
    assert failed_page() in commands
    assert ends(commands)[1].failed_blocks == (4, 5)
    assert ends(commands, "model")[1].failed_blocks == (4, 5)
    assert "CloseGets" not in kinds(commands), "nothing was opened"


def test_a_missing_asynchronous_load_touches_no_page() -> None:
    play = started()
    commands = play.answer(only(play.plan(1, load(1, {4: 40})), OpenGets), MISS)
    assert kinds(commands) == ["JobsEnded → model", "JobsEnded → scheduler"]


def test_a_whole_missing_job_does_not_wait_for_the_others() -> None:
    play = started()
    jobs = (load(1, {4: 40}, layerwise=True), load(2, {5: 50}, layerwise=True))
    commands = play.answer(only(play.plan(1, *jobs), OpenGets), [MISS, OK])
    assert kinds(commands) == ["JobsEnded → model", "JobsEnded → scheduler"]
    assert only(play.begin(1), LoadLayers).tainted


def test_one_object_into_two_blocks_takes_two_rounds_and_one_session() -> None:
    play = started()
    jobs = (load(1, {4: 40, 5: 50}, layerwise=True), load(2, {6: 40}, layerwise=True))
    gets = only(play.plan(1, *jobs), OpenGets)
    assert gets.keys == (key(40), key(50))
    play.answer(gets)
    first = only(play.begin(1), LoadLayers)
    assert (first.block_ids, first.publish) == ((4, 5), False)
    second = only(play.answer(first), LoadLayers)
    assert (second.keys, second.block_ids, second.publish) == ((key(40),), (6,), True)
    assert only(play.answer(second), CloseGets).keys == (key(40), key(50))


def test_a_failure_in_the_first_round_taints_the_last() -> None:
    play = started()
    jobs = (load(1, {4: 40}, layerwise=True), load(2, {6: 40}, layerwise=True))
    play.answer(only(play.plan(1, *jobs), OpenGets))
    second = only(play.answer(only(play.begin(1), LoadLayers), FAILED), LoadLayers)
    assert second.tainted


def test_the_same_object_in_two_batches_is_opened_twice() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40})), OpenGets))
    play.answer(only(play.plan(2, load(2, {5: 40})), OpenGets))
    closed = 0
    for command in play.begin(2):
        assert isinstance(command, LoadLayers)
        closed += kinds(play.answer(command)).count("CloseGets")
    assert closed == 2


def test_cancelled_before_the_gate() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40}), load(2, {5: 50})), OpenGets))
    commands = play.model(CancelJobs(job_ids=(1,)))
    assert kinds(commands) == ["JobsEnded → model", "JobsEnded → scheduler"]
    end = ends(commands)[1]
    assert (end.outcome, end.failed_blocks) == (JobOutcome.CANCELLED, (4,))
    loading = only(play.begin(1), LoadLayers)
    assert loading.block_ids == (5,)
    assert only(play.answer(loading), CloseGets).keys == (key(40), key(50))


def test_the_last_one_cancelled_before_the_gate_closes_the_sessions() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40}, layerwise=True)), OpenGets))
    commands = play.model(CancelJobs(job_ids=(1,)))
    assert kinds(commands) == [
        "PublishProgress",
        "CloseGets",
        "JobsEnded → model",
        "JobsEnded → scheduler",
    ]
    assert failed_page() in commands


def test_cancelled_in_flight_waits_for_the_terminal_event() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40, 5: 50}, layerwise=True)), OpenGets))
    loading = only(play.begin(1), LoadLayers)
    assert play.model(CancelJobs(job_ids=(1,))) == [Cancel(op=loading.op)]
    commands = play.answer(loading, [OK, Outcome.CANCELLED])
    end = ends(commands)[1]
    assert (end.outcome, end.failed_blocks) == (JobOutcome.CANCELLED, (5,))
    assert failed_page() in commands, "whoever waits for the last layer must go on"


def test_cancelled_too_late_to_matter_is_done() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40})), OpenGets))
    loading = only(play.begin(1), LoadLayers)
    play.model(CancelJobs(job_ids=(1,)))
    assert ends(play.answer(loading))[1].outcome is JobOutcome.DONE


def test_one_of_two_cancelled_in_flight_does_not_stop_the_other() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40}), load(2, {5: 50})), OpenGets))
    loading = only(play.begin(1), LoadLayers)
    assert play.model(CancelJobs(job_ids=(1,))) == []
    commands = play.answer(loading, [FAILED, OK])
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert ends(commands)[2].outcome is JobOutcome.DONE


def test_cancelled_while_its_sessions_open() -> None:
    play = started()
    gets = only(play.plan(1, load(1, {4: 40})), OpenGets)
    assert play.model(CancelJobs(job_ids=(1,))) == [Cancel(op=gets.op)]
    commands = play.answer(gets)
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert only(commands, CloseGets).keys == (key(40),)


def test_cancelling_an_ended_job_is_nothing() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40})), OpenGets), MISS)
    assert play.model(CancelJobs(job_ids=(1,))) == []


@pytest.mark.parametrize("layerwise", [True, False])
def test_while_the_store_is_down_loads_fail_without_asking_it(layerwise: bool) -> None:
    play = started()
    play.store_down()
    commands = play.plan(1, load(1, {4: 40}, layerwise=layerwise))
    assert "OpenGets" not in kinds(commands)
    assert (failed_page() in commands) == layerwise
    assert ends(commands)[1].reason == "store-down"
    assert ends(commands, "model")[1].failed_blocks == (4,)


def test_the_store_goes_down_while_a_load_waits_for_its_gate() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40}, layerwise=True)), OpenGets))
    commands = play.store_down()
    assert failed_page() in commands
    assert only(commands, CloseGets).keys == (key(40),)
    assert ends(commands)[1].reason == "store-down"


def test_a_refused_layerwise_job_fails_the_page_at_once() -> None:
    play = started()
    commands = play.plan(1, load(1, {99: 40}, layerwise=True))
    assert failed_page() in commands
    assert ends(commands, "model")[1].failed_blocks == (99,)


def test_a_refused_layerwise_job_taints_the_others() -> None:
    play = started()
    jobs = (load(1, {99: 40}, layerwise=True), load(2, {5: 50}, layerwise=True))
    play.answer(only(play.plan(1, *jobs), OpenGets))
    assert only(play.begin(1), LoadLayers).tainted


def test_an_empty_layerwise_job_lets_the_step_go_on() -> None:
    commands = started().plan(1, load(1, {}, layerwise=True))
    assert PublishProgress(engine=ENGINE, step=1, num_layers=3, failed=False) in commands
    assert ends(commands)[1].outcome is JobOutcome.DONE


def test_several_groups_tell_the_page_once_all_are_loaded() -> None:
    play = Playbook()
    commands = play.model(attach(groups=(group_layout(0, 3), group_layout(1, 2))))
    play.answer(commands[0])
    play.hello()
    jobs = (load(1, {4: 40}, layerwise=True), load(2, {5: 50}, layerwise=True, group=1))
    for command in play.plan(1, *jobs):
        if isinstance(command, OpenGets):
            play.answer(command)
    first, second = (c for c in play.begin(1) if isinstance(c, LoadLayers))
    assert not first.publish
    assert not second.publish
    assert "PublishProgress" not in kinds(play.answer(first))
    page = only(play.answer(second), PublishProgress)
    assert (page.num_layers, page.failed) == (5, False)


def test_an_old_step_does_not_overwrite_the_page_of_a_new_one() -> None:
    play = started()
    gets = only(play.plan(1, load(1, {4: 40}, layerwise=True)), OpenGets)
    play.begin(65)
    commands = play.answer(gets, MISS)
    assert "PublishProgress" not in kinds(commands)
    assert list(ends(commands)) == [1]


def test_loads_go_on_without_their_scheduler_side() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40})), OpenGets))
    assert play.lose("scheduler") == []
    commands = play.answer(only(play.begin(1), LoadLayers))
    assert kinds(commands) == ["CloseGets", "JobsEnded → model"]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.EXPIRED, "expired"),
        (Outcome.DOWN, "store-down"),
        (Outcome.FAILED, "transfer-failed"),
        (Outcome.MISS, "evicted"),
    ],
)
def test_why_a_load_failed(outcome: Outcome, reason: str) -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40})), OpenGets))
    assert ends(play.answer(only(play.begin(1), LoadLayers), outcome))[1].reason == reason
