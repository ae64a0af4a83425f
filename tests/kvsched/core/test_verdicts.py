from kvcommon.messages import JobOutcome, StepVerdict
from kvsched.core.commands import SendToDaemon
from tests.support.schedplay import Play, loads, more, new, saved_blocks, saves, verdicts


def test_a_good_step_gets_one_clean_verdict_on_every_rank() -> None:
    play = Play(ranks=2)
    play.admit("a", 100, 0, range(1, 8))
    play.step(1, new("a", range(1, 8), 0, 100))
    commands = play.done(1)
    assert commands == [SendToDaemon(rank=r, body=StepVerdict(step=1)) for r in (0, 1)]
    assert play.done(1) == []


def test_a_step_without_open_jobs_gets_none() -> None:
    play = Play()
    play.admit("a", 64, 4, range(1, 5))
    play.step(1, new("a", range(1, 5), 63, 1))
    play.end_all()
    assert play.done(1) == []


def test_a_load_that_outlasts_its_step_is_told_that_the_step_has_begun() -> None:
    play = Play(load="async")
    play.admit("a", 64, 4, range(1, 5))
    play.step(1)
    assert verdicts(play.done(1)) == [StepVerdict(step=1)]
    assert verdicts(play.daemon()) == [StepVerdict(step=1)]
    play.end_all()
    assert verdicts(play.daemon()) == []


def test_saves_of_a_request_whose_load_failed_are_tainted_and_made_again() -> None:
    play = Play()
    play.admit("a", 100, 2, range(1, 8))
    commands = play.step(1, new("a", range(1, 8), 32, 68))
    load, save = loads(commands)[0], saves(commands)[0]
    assert "a" not in play.core.active
    play.end(load.job_id, failed=(2,))
    assert verdicts(play.done(1, 2)) == [StepVerdict(step=1, tainted=(save.job_id,))]
    assert "a" in play.core.active
    # Rolled back to the first failed block; the revoked job must end before its keys are free.
    again = play.step(2, more("a", 16, 84))
    assert saved_blocks(again) == [2]
    play.end(save.job_id, outcome=JobOutcome.CANCELLED)
    assert verdicts(play.done(2)) == [StepVerdict(step=2)]
    (job,) = saves(play.step(3, more("a", 100, 1)))
    assert (job.block_ids, job.computed) == ((3, 4, 5, 6), True)
    assert play.core.counters["saves_tainted"] == 1


def test_a_step_that_was_already_planned_on_bad_blocks_is_tainted_too() -> None:
    """Async scheduling: step 2 is under way when the output of step 1 arrives."""
    play = Play()
    play.admit("a", 100, 2, range(1, 8))
    play.step(1, new("a", range(1, 8), 32, 32))
    (job,) = saves(play.step(2, more("a", 64, 36)))
    assert verdicts(play.done(1, 1))[0].tainted != ()
    assert verdicts(play.done(2)) == [StepVerdict(step=2, tainted=(job.job_id,))]


def test_a_request_that_shares_the_bad_block_is_tainted_and_barred_too() -> None:
    play = Play()
    play.admit("a", 64, 2, range(1, 5))
    play.found(play.add("b", 64), 2)
    play.ask("b", 64, 32)
    play.alloc("b", [1, 2, 8, 9])
    play.admit("c", 64, 0, range(11, 15), "q")
    commands = play.step(
        1,
        new("a", range(1, 5), 32, 16),
        new("b", [1, 2, 8, 9], 32, 32),
        new("c", range(11, 15), 0, 64),
    )
    by_request = {job.request_id: job for job in saves(commands)}
    # a and b complete block 2 of the same prompt: one of them saves it.
    assert by_request["a"].block_ids == (3,)
    assert by_request["b"].block_ids == (9,)
    (verdict,) = verdicts(play.done(1, 2))
    assert verdict.tainted == (by_request["a"].job_id, by_request["b"].job_id)
    assert play.ask("b", 64).num_tokens == 0
    assert play.ask("c", 64).num_tokens is None


def test_what_was_computed_from_bad_blocks_is_tainted_wherever_it_stands() -> None:
    """Request b has another copy of block 0 but shares block 1, computed from the bad copy."""
    play = Play()
    play.admit("a", 64, 1, [1, 2, 3, 4])
    play.step(1, new("a", [1, 2, 3, 4], 16, 48))
    play.add("b", 80)
    play.later(200)
    play.ask("b", 80, 64)
    play.alloc("b", [21, 2, 3, 4, 5])
    (job,) = saves(play.step(2, new("b", [21, 2, 3, 4, 5], 64, 16)))
    play.done(1, 1)
    assert verdicts(play.done(2)) == [StepVerdict(step=2, tainted=(job.job_id,))]


def test_failed_blocks_that_a_daemon_reported_taint_even_if_vllm_was_not_told() -> None:
    play = Play()
    play.admit("a", 100, 2, range(1, 8))
    commands = play.step(1, new("a", range(1, 8), 32, 68))
    play.end(loads(commands)[0].job_id, outcome=JobOutcome.FAILED)
    assert verdicts(play.done(1)) == [StepVerdict(step=1, tainted=(saves(commands)[0].job_id,))]


def test_a_step_that_never_finished_is_not_published() -> None:
    play = Play()
    play.admit("a", 100, 0, range(1, 8))
    (first,) = saves(play.step(1, new("a", range(1, 8), 0, 64)))
    play.step(2, more("a", 64, 36))
    assert verdicts(play.done(2)) == [
        StepVerdict(step=1, tainted=(first.job_id,)),
        StepVerdict(step=2),
    ]
    assert play.core.counters["steps_missed"] == 1
    assert verdicts(play.done(1)) == []
    play.end_all()
    assert saved_blocks(play.step(3, more("a", 100, 1))) == [1, 2, 3, 4, 5, 6]


def test_where_vllm_may_not_recover_a_request_saves_nothing_until_it_starts_again() -> None:
    play = Play(sync_is_safe=False, load="layerwise")
    play.admit("a", 100, 2, range(1, 8))
    commands = play.step(1, new("a", range(1, 8), 32, 32))
    play.done(1, 2)
    play.end_all()
    assert saves(play.step(2, more("a", 16, 84))) == []
    assert loads(commands)
    play.step(3, preempted=("a",))
    play.alloc("a", range(11, 18))
    assert saved_blocks(play.step(4, new("a", range(11, 18), 0, 100))) == list(range(12, 18))[:-1]


def test_a_failed_asynchronous_load_starts_again_as_new_and_saves_what_it_computes() -> None:
    play = Play(load="async", sync_is_safe=False)
    play.admit("a", 100, 4, range(1, 8))
    (job,) = loads(play.step(1))
    play.end(job.job_id, failed=(2, 3))
    assert verdicts(play.done(1, 2, 3)) == []
    assert "a" in play.core.active
    assert saved_blocks(play.step(2, new("a", range(1, 8), 16, 84))) == [2, 3, 4, 5, 6]


def test_a_save_that_ended_before_its_verdict_still_gets_it() -> None:
    play = Play()
    play.admit("a", 100, 0, range(1, 8))
    (job,) = saves(play.step(1, new("a", range(1, 8), 0, 100)))
    play.end(job.job_id, outcome=JobOutcome.FAILED)
    assert play.held == {}
    assert verdicts(play.done(1)) == [StepVerdict(step=1)]


def test_a_daemon_that_was_out_of_reach_hears_the_verdict_when_it_returns() -> None:
    play = Play(ranks=2)
    play.admit("a", 100, 0, range(1, 8))
    play.step(1, new("a", range(1, 8), 0, 64))
    play.step(2, more("a", 64, 36))
    play.lost(1, dead=False)
    assert [c.rank for c in play.done(1) if isinstance(c, SendToDaemon)] == [0]
    assert play.daemon(1) == [SendToDaemon(rank=1, body=StepVerdict(step=1))]
    assert len(verdicts(play.done(2), 1)) == 1
    play.end_all()
    assert play.daemon(1) == []


def test_a_new_daemon_is_not_told_about_steps_of_the_old_one() -> None:
    play = Play(ranks=2)
    play.admit("a", 100, 0, range(1, 8))
    play.step(1, new("a", range(1, 8), 0, 100))
    play.daemon(1, epoch=8)
    assert [c.rank for c in play.done(1) if isinstance(c, SendToDaemon)] == [0]


def test_the_speed_of_prefill_is_measured_on_steps_without_loads() -> None:
    play = Play()
    play.admit("a", 100, 0, range(1, 8))
    play.step(1, new("a", range(1, 8), 0, 100))
    play.later(100)
    play.done(1)
    worth = play.core._state.worth
    assert worth.seconds_per_token == 0.001
    play.admit("b", 200, 4, range(11, 24), "q")
    play.step(2, new("b", range(11, 24), 64, 136))
    play.later(9999)
    play.done(2)
    assert worth.seconds_per_token == 0.001
