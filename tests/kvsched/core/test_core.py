import pytest

from kvcommon.messages import Lookup, ReleaseLookup, ResetStore, StepPlan, StepVerdict
from kvsched.core.commands import FreeBlocks, SendToDaemon
from kvsched.core.core import CoreConfig, SchedCore
from kvsched.core.events import RanksKnown, ResetAsked, Ticked
from tests.support.schedplay import Play, loads, more, new, saved_blocks, saves, told, verdicts


def test_a_core_needs_nothing_but_its_configuration() -> None:
    core = SchedCore(CoreConfig())
    assert not core.has_pending
    assert not core.serving
    assert core.handle(Ticked(now_ns=1)) == []


def test_a_restarted_daemon_ends_the_jobs_of_the_old_process() -> None:
    play = Play(ranks=2)
    play.admit("a", 100, 2, range(1, 8))
    commands = play.step(1, new("a", range(1, 8), 32, 68))
    ids = (loads(commands)[0].job_id, saves(commands)[0].job_id)
    assert play.core.open_jobs(1) == ids
    assert play.daemon(1, epoch=8) == []
    assert play.core.open_jobs(1) == ()
    assert play.core.open_jobs(0) == ids
    assert [type(c) for c in play.end(*ids, rank=0)] == [FreeBlocks, FreeBlocks]
    assert play.core.counters["daemon_restarts"] == 1
    assert play.core.counters["jobs.save.failed"] == 1


def test_a_dead_daemon_gives_its_blocks_back_and_a_frozen_one_does_not() -> None:
    play = Play()
    play.admit("a", 100, 0, range(1, 8))
    play.step(1, new("a", range(1, 8), 0, 64))
    play.lost(0, dead=False)
    assert play.busy()
    assert play.core.num_held_blocks == 4
    assert not play.serving()
    assert saves(play.step(2, more("a", 64, 36))) == []
    assert [type(c) for c in play.lost(0, dead=True)] == [FreeBlocks]
    assert not play.busy()
    assert play.core.counters["daemons_lost"] == 1


def test_a_daemon_that_returns_as_it_was_keeps_its_jobs() -> None:
    play = Play()
    play.admit("a", 100, 0, range(1, 8))
    play.step(1, new("a", range(1, 8), 0, 64))
    play.lost(0, dead=False)
    assert play.daemon(0) == []
    assert play.core.num_held_blocks == 4
    assert saved_blocks(play.step(2, more("a", 64, 36))) == [5, 6]


def test_a_missing_acknowledgement_stops_serving_until_it_comes() -> None:
    play = Play(ranks=2)
    play.admit("a", 100, 0, range(1, 8))
    play.step(1, new("a", range(1, 8), 0, 64))
    play.ack(1, rank=0)
    play.later(2001)
    assert play.say(Ticked(now_ns=play.now_ns)) == []
    assert not play.serving()
    assert play.ask("a", 100).reason == "daemon-lost"
    play.say(Ticked(now_ns=play.now_ns))
    assert play.core.counters["acks_late"] == 1
    play.ack(1, rank=1)
    assert play.serving()


def test_a_welcome_forgives_missing_acknowledgements() -> None:
    play = Play()
    play.admit("a", 100, 0, range(1, 8))
    play.step(1, new("a", range(1, 8), 0, 64))
    play.later(2001)
    play.say(Ticked(now_ns=play.now_ns))
    assert not play.serving()
    play.daemon(0)
    assert play.serving()
    play.say(Ticked(now_ns=play.now_ns))
    assert play.serving()


def test_an_acknowledgement_stands_for_the_earlier_ones() -> None:
    play = Play()
    play.admit("a", 100, 0, range(1, 8))
    play.step(1, new("a", range(1, 8), 0, 64))
    play.step(2, more("a", 64, 36))
    play.ack(2)
    play.later(9999)
    play.say(Ticked(now_ns=play.now_ns))
    assert play.serving()


def test_a_rank_that_is_no_longer_named_ends_its_jobs() -> None:
    play = Play(ranks=2)
    play.admit("a", 100, 0, range(1, 8))
    commands = play.step(1, new("a", range(1, 8), 0, 64))
    play.end(saves(commands)[0].job_id, rank=0)
    ranks = told(commands, StepPlan)
    assert len(ranks) == 2
    freed = play.say(RanksKnown(now_ns=play.now_ns, ranks=()))
    assert [type(c) for c in freed] == [FreeBlocks]


def test_a_reset_forgets_what_is_stored_and_publishes_nothing_older() -> None:
    play = Play()
    play.admit("a", 100, 2, range(1, 8))
    (job,) = saves(play.step(1, new("a", range(1, 8), 32, 32)))
    play.found(play.add("b", 100, "q"), 3)
    commands = play.say(ResetAsked(now_ns=play.now_ns))
    assert commands == [
        SendToDaemon(rank=0, body=ReleaseLookup(lookup_id=2)),
        SendToDaemon(rank=0, body=ResetStore()),
    ]
    assert verdicts(play.done(1)) == [StepVerdict(step=1, tainted=(job.job_id,))]
    # What runs on blocks from before the reset is not saved.
    assert saves(play.step(2, more("a", 64, 36))) == []
    assert "a" not in play.core.active
    assert len(told(play.ask_all("b", 100), Lookup)) == 1
    play.end_all()
    # Once it starts again it is.
    play.step(3, preempted=("a",))
    play.found(play.ask_all("a", 100), 0)
    play.alloc("a", range(11, 18))
    assert saved_blocks(play.step(4, new("a", range(11, 18), 0, 100))) == list(range(11, 17))


def test_a_daemon_that_missed_a_reset_makes_up_for_it_before_it_serves() -> None:
    play = Play(ranks=2)
    play.lost(1, dead=True)
    assert len(told(play.say(ResetAsked(now_ns=play.now_ns)), ResetStore)) == 1
    assert play.daemon(1, epoch=9) == [SendToDaemon(rank=1, body=ResetStore())]
    assert play.daemon(1, epoch=10) == []


def test_two_requests_with_the_same_prompt_save_it_once() -> None:
    play = Play()
    play.admit("a", 64, 0, range(1, 5))
    play.admit("b", 64, 0, range(11, 15))
    commands = play.step(1, new("a", range(1, 5), 0, 64), new("b", range(11, 15), 0, 64))
    assert saved_blocks(commands) == [1, 2, 3, 4]
    assert "b" not in play.core.active


def test_a_shared_block_is_held_once_per_job() -> None:
    play = Play(load="async")
    play.admit("a", 64, 2, range(1, 5))
    play.step(1)
    play.end_all()
    play.found(play.add("b", 64), 2)
    play.ask("b", 64, 32)
    play.alloc("b", [1, 2, 8, 9])
    commands = play.step(2, new("a", range(1, 5), 32, 32), new("b", [1, 2, 8, 9], 32, 32))
    assert saved_blocks(commands) == [3, 4]
    play.finish("a")
    play.finish("b")
    assert play.core.num_held_blocks == 2


def test_vllms_cache_may_offer_blocks_that_were_never_computed_again() -> None:
    """The request is preempted half way through a spoilt block, which vLLM still has cached."""
    play = Play()
    play.admit("a", 100, 1, range(1, 8))
    play.step(1, new("a", range(1, 8), 16, 84))
    play.done(1, 1)
    play.end_all()
    assert saved_blocks(play.step(2, more("a", 0, 40))) == [1, 2]
    play.done(2)
    play.end_all()
    play.step(3, preempted=("a",))
    play.ask("a", 100, 96)
    play.alloc("a", [1, 2, 3, 4, 5, 6, 11])
    assert saves(play.step(4, new("a", [1, 2, 3, 4, 5, 6, 11], 96, 4))) == []


def test_finishing_a_request_leaves_its_saves_alone() -> None:
    play = Play()
    play.admit("a", 64, 0, range(1, 5))
    play.step(1, new("a", range(1, 5), 0, 64))
    assert play.finish("a") == []
    assert play.finish("a") == []
    assert play.core.num_held_blocks == 4
    assert verdicts(play.done(1)) == [StepVerdict(step=1)]
    play.end_all()
    assert not play.busy()


def test_validate_sees_a_reference_that_is_not_accounted_for() -> None:
    play = Play()
    play.admit("a", 64, 0, range(1, 5))
    play.step(1, new("a", range(1, 5), 0, 64))
    play.core._state.ledger.num_held_blocks += 1
    with pytest.raises(AssertionError):
        play.core.validate()


def test_validate_sees_two_lookups_in_one_place() -> None:
    play = Play()
    play.add("a", 64)
    play.core._matcher._waiting[9] = "a"
    with pytest.raises(AssertionError):
        play.core.validate()


def test_validate_sees_a_forgotten_request_in_active() -> None:
    play = Play()
    play.core._state.active["x"] = None
    with pytest.raises(AssertionError):
        play.core.validate()


def test_the_same_events_give_the_same_commands() -> None:
    play = Play(ranks=2, load="async")
    play.admit("b", 100, 2, range(11, 18), "q")
    play.admit("a", 100, 2, range(1, 8))
    play.step(1)
    play.end_all()
    play.step(2, new("b", range(11, 18), 32, 68), new("a", range(1, 8), 32, 68))
    play.finish("a")
    play.done(2, 14)
    play.end_all()
    play.replay()
