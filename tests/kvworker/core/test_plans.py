"""Plans: acknowledged always; a bad job ends as failed, never as an exception."""

import pytest

from kvcommon.messages import JobOutcome, LoadJob, PlanAck, SaveJob
from kvworker.core.commands import OpenGets, OpenPuts
from tests.support.playbook import (
    NUM_BLOCKS,
    Playbook,
    block_hash,
    ends,
    key,
    kinds,
    load,
    only,
    said,
    save,
    started,
)


def test_a_plan_is_acknowledged_first() -> None:
    commands = started().plan(3, load(1, {4: 40}), save(2, {5: 50}))
    assert kinds(commands) == ["PlanAck → scheduler", "OpenGets"]
    assert said(commands, PlanAck).step == 3


def test_without_an_attached_model_side_every_job_fails() -> None:
    play = Playbook()
    play.hello()
    commands = play.plan(1, load(1, {4: 40}, layerwise=True), load(2, {5: 50}), save(3, {6: 60}))
    assert kinds(commands) == ["PlanAck → scheduler", "JobsEnded → scheduler"]
    told = ends(commands)
    assert {end.outcome for end in told.values()} == {JobOutcome.FAILED}
    assert {end.reason for end in told.values()} == {"daemon-not-attached"}
    assert [end.failed_blocks for end in told.values()] == [(4,), (5,), (6,)]


BAD: dict[str, LoadJob | SaveJob] = {
    "a group that does not exist": load(1, {4: 40}, group=7),
    "a save of such a group": save(1, {4: 40}, group=7),
    "the null block": load(1, {0: 40}),
    "a block beyond the last": save(1, {NUM_BLOCKS: 40}),
    "a negative block": load(1, {-1: 40}),
    "too few hashes": LoadJob(
        job_id=1,
        request_id="r",
        group=0,
        block_ids=(4, 5),
        block_hashes=(block_hash(40),),
        layerwise=False,
    ),
    "too many hashes": SaveJob(
        job_id=1,
        request_id="r",
        group=0,
        block_ids=(4,),
        block_hashes=(block_hash(40), block_hash(50)),
    ),
}


@pytest.mark.parametrize("job", BAD.values(), ids=BAD)
def test_a_bad_job_fails_and_the_good_ones_go_on(job: LoadJob | SaveJob) -> None:
    play = started()
    commands = play.plan(1, job, load(2, {5: 50}), save(3, {6: 60}))
    end = ends(commands)[1]
    assert (end.outcome, end.reason) == (JobOutcome.FAILED, "bad-plan")
    assert end.failed_blocks == job.block_ids
    assert only(commands, OpenGets).keys == (key(50),)
    assert only(play.begin(1), OpenPuts).keys == (key(60),)


@pytest.mark.parametrize("step", [0, -1, 1 << 40])
def test_an_impossible_step(step: int) -> None:
    commands = started().plan(step, load(1, {4: 40}, layerwise=True), save(2, {5: 50}))
    assert [end.reason for end in ends(commands).values()] == ["bad-plan", "bad-plan"]
    assert "PublishProgress" not in kinds(commands)


def test_a_repeated_job_is_counted_and_ignored() -> None:
    play = started()
    play.plan(1, load(1, {4: 40}))
    commands = play.plan(2, load(1, {5: 50}), save(1, {6: 60}))
    assert kinds(commands) == ["PlanAck → scheduler"]
    name = 'kvferry_protocol_errors_total{what="repeated-job"}'
    assert play.core.status().metrics[name] == 2


def test_a_job_that_has_ended_is_not_done_again() -> None:
    play = Playbook()
    play.hello()
    play.plan(1, load(1, {4: 40}))
    play.attach()
    assert kinds(play.plan(2, load(1, {4: 40}))) == ["PlanAck → scheduler"]


def test_too_many_jobs_at_once() -> None:
    play = started(max_open_jobs=2)
    commands = play.plan(1, load(1, {4: 40}), load(2, {5: 50}), save(3, {6: 60}))
    assert [(number, end.reason) for number, end in ends(commands).items()] == [(3, "overload")]


def test_an_empty_save_is_skipped() -> None:
    assert ends(started().plan(1, save(1, {})))[1].outcome is JobOutcome.SKIPPED
