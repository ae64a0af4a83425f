"""Scheduler sides that come, come again, are replaced and go."""

from kvcommon.messages import (
    JobEnd,
    JobOutcome,
    Refused,
    ResetStore,
    StepPlan,
    StoreHealth,
    StoreState,
    Welcome,
)
from kvworker.core.commands import (
    Cancel,
    CloseGets,
    ClosePuts,
    LoadLayers,
    OpenGets,
    OpenPuts,
    ResetNamespace,
    WriteLayers,
)
from kvworker.outcome import Outcome
from tests.support.playbook import (
    MARK,
    SCHEDULER,
    Playbook,
    ends,
    key,
    kinds,
    load,
    only,
    said,
    save,
    started,
)

NEXT = SCHEDULER + 1


def test_an_unknown_scheduler_side_is_asked_for_hello() -> None:
    play = Playbook()
    refused = said(play.plan(1, save(1, {4: 40})), Refused)
    assert refused.resync
    assert "Hello" in refused.remedy


def test_an_old_scheduler_side_is_not_heard() -> None:
    play = started()
    play.hello(epoch=NEXT)
    assert play.plan(1, save(1, {4: 40})) == []
    counters = play.core.status().metrics
    assert counters['kvferry_stale_messages_total{role="scheduler"}'] == 1


def test_jobs_that_nobody_knows_end_as_failed() -> None:
    play = started()
    commands = play.hello([7, 8, 7])
    assert kinds(commands) == ["Welcome → scheduler", "JobsEnded → scheduler"]
    assert ends(commands) == {
        number: JobEnd(job_id=number, outcome=JobOutcome.FAILED, reason="daemon-lost")
        for number in (7, 8)
    }
    assert "OpenPuts" not in kinds(play.plan(1, save(7, {4: 40}))), "it has ended"


def test_open_jobs_stay_open_and_ended_ones_are_told_again() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40})), OpenGets), Outcome.MISS)
    play.plan(2, load(2, {5: 50}))
    told = ends(play.hello([1, 2]))
    assert list(told) == [1]
    assert told[1].reason == "evicted"


def test_ended_jobs_are_forgotten_beyond_the_bound() -> None:
    play = started(ended_memory=1)
    for number in (1, 2):
        play.answer(only(play.plan(1, load(number, {4: number})), OpenGets), Outcome.MISS)
    told = ends(play.hello([1, 2]))
    assert [told[1].reason, told[2].reason] == ["daemon-lost", "evicted"]
    assert ends(play.hello([1]))[1].reason == "daemon-lost"


def test_what_the_scheduler_side_does_not_believe_open_is_given_up() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40}), load(2, {5: 50})), OpenGets))
    commands = play.hello([2])
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert only(play.begin(1), LoadLayers).block_ids == (5,)


def test_saves_whose_verdict_may_be_lost_are_revoked() -> None:
    play = started()
    play.answer(only(play.plan(1, save(1, {4: 40})) + play.begin(1), OpenPuts))
    commands = play.hello([1])
    assert only(commands, ClosePuts).revoke == (key(40),)
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED


def test_judged_saves_survive_a_new_hello() -> None:
    play = started()
    play.answer(only(play.plan(1, save(1, {4: 40})) + play.begin(1), OpenPuts))
    play.verdict(1)
    assert kinds(play.hello([1])) == ["Welcome → scheduler"]
    close = only(play.answer(only(play.computed(1), WriteLayers)), ClosePuts)
    assert ends(play.answer(close))[1].outcome is JobOutcome.DONE


def test_a_new_scheduler_side_ends_what_the_old_one_planned() -> None:
    play = started()
    writing = only(
        play.answer(only(play.plan(1, save(1, {4: 40}, computed=True)) + play.begin(1), OpenPuts)),
        WriteLayers,
    )
    loading = only(play.answer(only(play.plan(1, load(2, {5: 50})), OpenGets)), LoadLayers)
    play.answer(only(play.plan(9, load(3, {6: 60})), OpenGets))
    commands = play.hello(epoch=NEXT)
    assert [c.op for c in commands if isinstance(c, Cancel)] == [writing.op, loading.op]
    assert only(commands, CloseGets).keys == (key(60),)
    assert ends(commands) == {}, "the old one is not told"
    assert list(ends(commands, "model")) == [3]
    commands = play.answer(writing, Outcome.CANCELLED)
    assert only(commands, ClosePuts).revoke == (key(40),)
    assert ends(commands) == {}
    assert list(ends(play.answer(loading, Outcome.CANCELLED), "model")) == [2]


def test_job_ids_of_different_scheduler_sides_do_not_collide() -> None:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40})), OpenGets), Outcome.MISS)
    play.hello(epoch=NEXT)
    assert "OpenGets" in kinds(play.plan(1, load(1, {4: 40}), epoch=NEXT))


def test_steps_are_counted_anew_under_a_new_scheduler_side() -> None:
    play = started()
    play.plan(500, save(1, {4: 40}))
    play.begin(500)
    play.hello(epoch=NEXT)
    play.answer(only(play.plan(1, load(1, {5: 50}), epoch=NEXT), OpenGets))
    assert kinds(play.begin(1)) == ["LoadLayers"]


def test_a_step_that_began_before_the_first_hello_counts() -> None:
    play = Playbook()
    play.attach()
    play.begin(1)
    play.hello()
    play.hello(epoch=NEXT)
    gets = only(play.plan(1, load(1, {5: 50}), epoch=NEXT), OpenGets)
    assert kinds(play.answer(gets)) == ["LoadLayers"]


def test_a_lost_scheduler_side_is_not_spoken_to() -> None:
    play = started()
    play.lose("scheduler")
    assert kinds(play.model(play.log[0][0].body, epoch=99)) == ["UnmapEngine"]  # type: ignore[union-attr]
    assert play.lose("scheduler") == []


def test_the_loss_of_an_old_scheduler_side_means_nothing() -> None:
    play = started()
    assert play.lose("scheduler", epoch=SCHEDULER - 1) == []
    assert kinds(play.plan(1)) == ["PlanAck → scheduler"]


def test_hello_while_the_store_is_down() -> None:
    play = started()
    play.store_down()
    commands = play.hello(epoch=NEXT)
    assert said(commands, Welcome).attached
    assert said(commands, StoreHealth).state is StoreState.DOWN


def test_a_reset_removes_every_rank_of_the_engine() -> None:
    play = Playbook()
    play.attach()
    play.hello(marks=("b" * 24, MARK, MARK))
    reset = only(play.scheduler(ResetStore()), ResetNamespace)
    assert reset.prefixes == (f"kvf1-{'b' * 24}-", f"kvf1-{MARK}-")
    assert play.answer(reset, num_removed=3) == []
    assert play.core.status().metrics["kvferry_objects_removed_total"] == 3


def test_a_reset_waits_until_the_store_is_up() -> None:
    play = started()
    play.store_down()
    assert play.scheduler(ResetStore()) == []
    assert play.scheduler(ResetStore()) == []
    commands = play.store_up()
    assert kinds(commands) == ["StoreHealth → scheduler", "ResetNamespace"]


def test_a_reset_of_nothing() -> None:
    play = Playbook()
    play.hello(marks=())
    assert play.scheduler(ResetStore()) == []


def test_an_empty_plan_is_acknowledged() -> None:
    assert kinds(started().scheduler(StepPlan(step=3))) == ["PlanAck → scheduler"]
