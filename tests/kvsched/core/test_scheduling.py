from kvcommon.messages import JobOutcome, ReleaseLookup, StepPlan
from kvsched.core.commands import FreeBlocks, HoldBlocks, SendToDaemon, TellModel
from kvsched.core.events import StoreChanged
from kvsched.core.planning import MAX_SKIPS
from tests.support.schedplay import (
    Play,
    counted,
    hashes,
    loads,
    model,
    more,
    new,
    saved_blocks,
    saves,
    told,
)


def test_a_step_with_nothing_to_do_says_nothing() -> None:
    play = Play()
    play.admit("a", 10, 0, [1])
    assert play.step(1, new("a", [1], 0, 10)) == []
    assert play.done(1) == []


def test_holds_come_first_then_plans_by_rank_then_the_model_side() -> None:
    play = Play(ranks=2)
    play.admit("a", 100, 2, range(1, 8))
    commands = play.step(1, new("a", range(1, 8), 32, 68))
    assert [type(command) for command in commands] == [
        HoldBlocks,
        HoldBlocks,
        SendToDaemon,
        SendToDaemon,
        TellModel,
    ]
    assert [command.rank for command in commands if isinstance(command, SendToDaemon)] == [0, 1]
    assert [command.block_ids for command in commands if isinstance(command, HoldBlocks)] == [
        (1, 2),
        (3, 4, 5, 6),
    ]
    load, save = loads(commands)[0], saves(commands)[0]
    assert save.block_hashes == hashes(6)[2:]
    assert not save.computed
    assert (load.job_id, save.job_id) == (1, 2)
    told_model = model(commands)
    assert told_model is not None
    assert (told_model.step, told_model.saves, told_model.cancel) == (1, True, ())
    assert told_model.loads[0].block_ids == (1, 2)


def test_eight_chunks_save_every_block_exactly_once() -> None:
    play = Play()
    play.admit("a", 8 * 32, 0, [1, 2])
    blocks: list[int] = []
    for chunk in range(8):
        fresh = [2 * chunk + 1, 2 * chunk + 2]
        request = new("a", fresh, 0, 32) if chunk == 0 else more("a", 32 * chunk, 32, fresh)
        assert "a" in play.core.active
        found = saved_blocks(play.step(chunk + 1, request))
        assert found == fresh
        blocks += found
        play.done(chunk + 1)
    assert counted(blocks) == counted(range(1, 17))
    assert "a" not in play.core.active
    assert saved_blocks(play.step(9, more("a", 256, 1, [17]))) == []


def test_chunks_that_end_inside_blocks_leave_no_holes() -> None:
    play = Play()
    play.admit("a", 100, 0, [1])
    blocks = []
    computed = 0
    for step, count in enumerate([10, 10, 25, 3, 40, 12], start=1):
        request = new("a", range(1, 8), 0, count) if step == 1 else more("a", computed, count)
        blocks += saved_blocks(play.step(step, request))
        computed += count
    assert blocks == [1, 2, 3, 4, 5, 6]


def test_a_block_that_fills_without_a_new_block_id_is_saved() -> None:
    play = Play()
    play.admit("a", 32, 0, [1, 2])
    assert saved_blocks(play.step(1, new("a", [1, 2], 0, 20))) == [1]
    assert saved_blocks(play.step(2, more("a", 20, 12))) == [2]


def test_a_full_hit_saves_nothing_and_settles() -> None:
    play = Play()
    play.admit("a", 64, 4, range(1, 5))
    commands = play.step(1, new("a", range(1, 5), 63, 1))
    assert saves(commands) == []
    assert len(loads(commands)) == 1
    assert "a" not in play.core.active


def test_a_resumed_full_hit_stays_active_until_its_block_table_is_complete() -> None:
    play = Play()
    play.found(play.add("a", 160), 10)
    play.ask("a", 160)
    play.alloc("a", range(1, 5), 32)
    play.step(1, new("a", range(1, 5), 32, 32))
    assert "a" in play.core.active
    play.step(2, more("a", 64, 96, range(5, 11)))
    assert "a" not in play.core.active


def test_the_part_beyond_a_shrunk_hit_is_computed_but_not_saved() -> None:
    play = Play()
    play.found(play.add("a", 160), 8)
    play.ask("a", 160)
    play.alloc("a", range(1, 11), 32)
    assert saved_blocks(play.step(1, new("a", range(1, 11), 32, 128))) == [9, 10]


def test_an_asynchronous_load_is_planned_before_the_request_runs() -> None:
    play = Play(sync_is_safe=False)
    play.admit("a", 100, 4, range(1, 8))
    assert play.wants_step()
    commands = play.step(1)
    (job,) = loads(commands)
    assert (job.layerwise, job.block_ids) == (False, (1, 2, 3, 4))
    assert saves(commands) == []
    assert not play.wants_step()
    assert play.busy()
    assert play.alloc("a", range(1, 9), 0) == []
    play.end(job.job_id)
    assert not play.busy()
    assert saved_blocks(play.step(2, new("a", range(1, 9), 64, 36))) == [5, 6]


def test_blocks_found_on_the_device_are_saved_as_they_may_be_computed_in_the_same_step() -> None:
    play = Play()
    play.admit("a", 64, 0, range(1, 5))
    play.found(play.add("b", 96), 0)
    play.ask("b", 96, 64)
    play.alloc("b", range(1, 7))
    commands = play.step(1, new("a", range(1, 5), 0, 64), new("b", range(1, 7), 64, 32))
    assert [(job.block_ids, job.computed) for job in saves(commands)] == [
        ((1, 2, 3, 4), False),
        ((5, 6), False),
    ]


def test_local_blocks_that_nobody_saves_are_saved_by_who_finds_them() -> None:
    play = Play()
    play.found(play.add("b", 96), 0)
    play.ask("b", 96, 64)
    play.alloc("b", range(1, 7))
    commands = play.step(1, new("b", range(1, 7), 64, 32))
    assert saved_blocks(commands) == [1, 2, 3, 4, 5, 6]


def test_blocks_that_another_request_loads_wait_for_the_load() -> None:
    play = Play()
    play.admit("a", 64, 2, range(1, 5))
    play.add("b", 64)
    play.later(200)
    play.ask("b", 64, 48)
    play.alloc("b", [1, 2, 3, 9])
    commands = play.step(1, new("a", range(1, 5), 32, 32), new("b", [1, 2, 3, 9], 48, 16))
    assert saved_blocks(commands) == [3, 4]
    play.end(loads(commands)[0].job_id)
    assert [(j.block_ids, j.computed) for j in saves(play.step(2, more("b", 64, 1)))] == [
        ((1, 2), True)
    ]


def test_the_null_block_is_never_saved() -> None:
    play = Play()
    play.admit("a", 64, 0, [0, 0, 3, 4])
    assert saved_blocks(play.step(1, new("a", [0, 0, 3, 4], 0, 64))) == [3, 4]


def test_generated_blocks_are_saved_when_asked_for_and_once_their_hash_is_known() -> None:
    play = Play(save_decode=True)
    play.admit("a", 30, 0, [1, 2])
    assert saved_blocks(play.step(1, new("a", [1, 2], 0, 30))) == [1]
    assert saves(play.step(2, more("a", 30, 1))) == []
    assert saves(play.step(3, more("a", 31, 1))) == []  # full, but the last token is not known
    (job,) = saves(play.step(4, more("a", 32, 1, [3], hashes(2)[1:])))
    assert (job.block_ids, job.computed) == ((2,), True)
    assert "a" in play.core.active


def test_generated_blocks_are_not_saved_otherwise() -> None:
    play = Play()
    play.admit("a", 30, 0, [1, 2])
    play.step(1, new("a", [1, 2], 0, 30))
    assert "a" not in play.core.active
    assert saves(play.step(2, more("a", 30, 20, [3], hashes(2)[1:]))) == []


def test_past_the_bound_saves_are_skipped_counted_and_made_up_for_later() -> None:
    play = Play(max_held_blocks=3)
    play.admit("a", 100, 0, range(1, 8))
    first = play.step(1, new("a", range(1, 8), 0, 100))
    assert saved_blocks(first) == [1, 2, 3]
    assert play.core.counters["saves_skipped_held"] == 3
    assert saves(play.step(2, more("a", 100, 1))) == []
    play.done(1)
    play.end(saves(first)[0].job_id)
    (job,) = saves(play.step(3, more("a", 101, 1)))
    assert (job.block_ids, job.computed) == ((4, 5, 6), True)
    assert "a" not in play.core.active


def test_a_save_that_never_fits_is_given_up() -> None:
    play = Play(max_held_blocks=0)
    play.admit("a", 100, 0, range(1, 8))
    play.step(1, new("a", range(1, 8), 0, 100))
    for step in range(2, MAX_SKIPS + 2):
        assert "a" in play.core.active
        play.step(step, more("a", 98 + step, 1))
    assert "a" not in play.core.active
    assert play.core.counters["saves_abandoned"] == 1
    play.step(999, preempted=("a",))
    assert "a" in play.core.active


def test_without_daemons_requests_settle_as_soon_as_their_prompt_is_computed() -> None:
    play = Play(ready=False)
    play.add("a", 100)
    play.alloc("a", range(1, 8))
    assert play.step(1, new("a", range(1, 8), 0, 50)) == []
    assert "a" in play.core.active
    assert play.step(2, more("a", 50, 50)) == []
    assert "a" not in play.core.active


def test_while_the_store_is_down_nothing_is_saved() -> None:
    play = Play()
    play.say(StoreChanged(now_ns=play.now_ns, rank=0, up=False))
    play.add("a", 100)
    play.alloc("a", range(1, 8))
    assert play.step(1, new("a", range(1, 8), 0, 50)) == []
    play.say(StoreChanged(now_ns=play.now_ns, rank=0, up=True))
    assert [(j.block_ids, j.computed) for j in saves(play.step(2, more("a", 50, 50)))] == [
        ((1, 2, 3), True),
        ((4, 5, 6), False),
    ]


def test_a_consumer_saves_nothing() -> None:
    play = Play(can_save=False)
    play.admit("a", 100, 2, range(1, 8))
    assert "a" in play.core.active
    commands = play.step(1, new("a", range(1, 8), 32, 68))
    assert (len(loads(commands)), saves(commands)) == (1, [])
    assert "a" not in play.core.active


def test_a_preempted_request_saves_only_what_it_had_not() -> None:
    """Resumed or (model runner V2) new again: the core is told the whole table either way."""
    play = Play()
    play.admit("a", 100, 0, range(1, 5))
    first = play.step(1, new("a", range(1, 5), 0, 64))
    assert saved_blocks(first) == [1, 2, 3, 4]
    play.step(2, preempted=("a",))
    assert play.held == {1: (1, 2, 3, 4)}
    assert "a" in play.core.active
    play.done(1)
    play.found(play.ask_all("a", 100), 0)
    play.ask("a", 100)
    play.alloc("a", range(11, 18))
    assert saved_blocks(play.step(3, new("a", range(11, 18), 0, 80))) == [15]
    assert saved_blocks(play.step(4, more("a", 80, 20))) == [16]
    assert play.held[1] == (1, 2, 3, 4)
    play.end_all()
    assert play.held == {}


def test_preemption_gives_the_hit_of_an_earlier_match_back() -> None:
    play = Play()
    play.found(play.add("a", 100), 3)
    assert len(told(play.step(1, preempted=("a", "unknown")), ReleaseLookup)) == 1


def test_preempted_and_admitted_again_in_one_step_keeps_the_new_load() -> None:
    play = Play()
    play.admit("a", 100, 0, range(1, 8))
    play.step(1, new("a", range(1, 8), 0, 100))
    play.found(play.ask_all("a", 100), 6)
    play.ask("a", 100)
    play.alloc("a", range(11, 18), 96)
    commands = play.step(2, new("a", range(11, 18), 96, 4), preempted=("a",))
    assert [job.block_ids for job in loads(commands)] == [tuple(range(11, 17))]
    assert saves(commands) == []


def test_the_plan_is_the_same_for_every_rank() -> None:
    play = Play(ranks=3)
    play.admit("a", 100, 2, range(1, 8))
    plans = told(play.step(1, new("a", range(1, 8), 32, 68)), StepPlan)
    assert len(plans) == 3
    assert plans[0] == plans[1] == plans[2]


def test_a_load_is_planned_even_if_a_daemon_was_lost_meanwhile() -> None:
    play = Play(ranks=2)
    play.admit("a", 100, 2, range(1, 8))
    play.lost(1, dead=False)
    commands = play.step(1, new("a", range(1, 8), 32, 68))
    (job,) = loads(commands)
    assert [c.rank for c in commands if isinstance(c, SendToDaemon)] == [0]
    assert saves(commands) == []
    told_model = model(commands)
    assert told_model is not None
    assert told_model.loads[0].job_id == job.job_id
    assert play.core.open_jobs(1) == ()
    play.end(job.job_id, rank=0)
    assert play.held == {}
    assert play.core.counters["jobs.layerwise_load.failed"] == 1
    assert play.core.counters["requests_barred"] == 1


def test_a_load_that_no_daemon_can_hear_of_is_over_at_once() -> None:
    play = Play()
    play.admit("a", 100, 2, range(1, 8))
    play.lost(0, dead=True)
    commands = play.step(1, new("a", range(1, 8), 32, 68))
    assert [type(c) for c in commands] == [HoldBlocks, TellModel, FreeBlocks]
    assert not play.busy()


def test_an_abort_before_the_plan_drops_a_layerwise_load() -> None:
    play = Play()
    play.admit("a", 100, 2, range(1, 8))
    assert told(play.finish("a"), ReleaseLookup) == [ReleaseLookup(lookup_id=1)]
    assert play.step(1) == []
    assert not play.busy()


def test_an_abort_before_the_plan_still_runs_and_cancels_an_asynchronous_load() -> None:
    """VLLM keeps the blocks until that load is reported ended."""
    play = Play(load="async")
    play.admit("a", 100, 2, range(1, 8))
    assert play.finish("a") == []
    told_model = model(play.step(1))
    assert told_model is not None
    assert told_model.cancel == (told_model.loads[0].job_id,)


def test_an_abort_during_an_asynchronous_load_cancels_it_once() -> None:
    play = Play(load="async")
    play.admit("a", 100, 2, range(1, 8))
    (job,) = loads(play.step(1))
    assert play.finish("a") == []
    assert play.wants_step()
    told_model = model(play.step(2))
    assert told_model == TellModel(step=2, cancel=(job.job_id,))
    assert play.step(3) == []
    assert play.held == {job.job_id: (1, 2)}
    play.end(job.job_id, outcome=JobOutcome.CANCELLED)
    assert play.held == {}


def test_a_load_that_ended_before_the_next_step_is_not_cancelled() -> None:
    play = Play(load="async")
    play.admit("a", 100, 2, range(1, 8))
    (job,) = loads(play.step(1))
    play.finish("a")
    play.end(job.job_id)
    assert not play.busy()
    assert play.step(2) == []


def test_requests_that_the_core_does_not_know_are_counted() -> None:
    play = Play()
    assert play.step(1, new("x", [1, 2], 0, 32)) == []
    assert play.core.counters["unknown_requests"] == 1


def test_preempted_and_admitted_again_before_a_step_keeps_the_new_table() -> None:
    play = Play(load="async")
    play.admit("a", 96, 0, range(1, 7))
    play.step(1, new("a", range(1, 7), 0, 96))
    play.done(1)
    play.end_all()
    # All of it is stored, so the next steps do not tell of it; a reset has preempted it.
    assert "a" not in play.core.active
    play.ask("a", 96)
    play.alloc("a", range(11, 17))
    play.step(2, preempted=("a",))
    assert play.core._state.requests["a"].blocks == list(range(11, 17))


def test_blocks_that_are_appended_to_an_unknown_table_are_not_saved() -> None:
    play = Play(save_decode=True)
    play.admit("a", 96, 0, range(1, 7))
    play.step(1, new("a", range(1, 7), 0, 50))
    play.step(2, preempted=("a",))
    assert saved_blocks(play.step(3, more("a", 0, 96, [9]))) == []
