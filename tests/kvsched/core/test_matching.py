import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcommon.errors import LocalProtocolError
from kvcommon.messages import Lookup, ReleaseLookup
from kvcommon.reasons import (
    ALREADY_LOCAL,
    DAEMON_LOST,
    DAEMON_NOT_ATTACHED,
    EVICTED,
    LOAD_FAILED_BEFORE,
    LOOKUP_TIMEOUT,
    NOT_STORED,
    NOT_WORTH_LOADING,
    ROLE,
    STORE_DOWN,
    TOO_SHORT,
)
from kvsched.core.commands import SendToDaemon
from kvsched.core.events import StoreChanged
from kvsched.core.matching import hit_tokens, loadable_blocks
from tests.support.schedplay import SIZE, Play, answer, hashes, loads, model, new, told


@given(st.integers(0, 200), st.integers(1, 32), st.integers(0, 20))
def test_a_hit_always_leaves_one_token_and_no_loadable_block_is_useless(
    tokens: int, size: int, cut: int
) -> None:
    blocks = loadable_blocks(tokens, max(0, tokens // size - cut), size)
    hit = hit_tokens(blocks, tokens, size)
    assert 0 <= hit <= max(0, tokens - 1)
    if blocks:
        assert hit > hit_tokens(blocks - 1, tokens, size)


def test_a_new_request_is_looked_up_once_at_rank_0() -> None:
    play = Play(ranks=2)
    commands = play.add("a", 100)
    (lookup,) = told(commands, Lookup)
    assert commands == [SendToDaemon(rank=0, body=lookup)]
    assert lookup.groups[0].block_hashes == hashes(6)


def test_a_prompt_of_whole_blocks_may_load_its_last_block_but_not_its_last_token() -> None:
    play = Play()
    commands = play.add("a", 64)
    assert len(told(commands, Lookup)[0].groups[0].block_hashes) == 4
    play.found(commands, 4)
    assert play.ask("a", 64).num_tokens == 63
    play.alloc("a", [1, 2, 3, 4], 63)
    (job,) = loads(play.step(1, new("a", [1, 2, 3, 4], 63, 1)))
    assert job.block_ids == (1, 2, 3, 4)
    assert job.block_hashes == hashes(4)


def test_asking_is_idle_only_while_a_lookup_of_the_same_request_is_out() -> None:
    """That the answer is the same then, and nothing changes, is checked at every question."""
    play = Play()

    def idle(num_tokens: int = 64) -> bool:
        return play.core.only_waits("a", num_tokens, play.now_ns)

    assert not idle()
    commands = play.add("a", 64)
    assert idle()
    assert play.ask("a", 64).num_tokens is None
    assert not idle(65)
    play.found(commands, 4)
    assert not idle()
    assert play.ask("a", 64).num_tokens == 63
    play.finish("a")
    assert not idle()
    play.add("a", 64)
    assert idle()
    play.later(play.config.lookup_timeout_ms - 1)
    assert idle()
    play.later(2)
    assert not idle()
    assert play.ask("a", 64).reason == LOOKUP_TIMEOUT


def test_asking_is_not_idle_once_the_daemon_is_gone() -> None:
    play = Play()
    play.add("a", 64)
    play.lost(dead=True)
    assert not play.core.only_waits("a", 64, play.now_ns)


@pytest.mark.parametrize("tokens", [0, 1, 15])
def test_a_prompt_shorter_than_a_block_is_never_looked_up(tokens: int) -> None:
    play = Play()
    assert play.add("a", tokens) == []
    assert play.ask("a", tokens).reason == TOO_SHORT
    assert "a" not in play.core.active


def test_pending_then_asked_80_times_gives_one_lookup_and_one_answer() -> None:
    play = Play()
    commands = play.add("a", 100)
    assert all(play.ask_all("a", 100) == [answer(play.ask_all("a", 100))] for _ in range(3))
    assert play.ask("a", 100).num_tokens is None
    play.found(commands, 3)
    answers = {play.ask("a", 100).num_tokens for _ in range(80)}
    assert answers == {48}
    assert play.core.counters["lookups"] == 1


def test_the_local_part_may_differ_between_calls() -> None:
    play = Play()
    play.found(play.add("a", 100), 4)
    assert play.ask("a", 100, 0).num_tokens == 64
    assert play.ask("a", 100, 32).num_tokens == 32
    assert play.ask("a", 100, 64).reason == ALREADY_LOCAL
    assert play.ask("a", 100, 16).num_tokens == 48
    play.alloc("a", range(1, 8), 48)
    (job,) = loads(play.step(1, new("a", range(1, 8), 64, 36)))
    assert job.block_ids == (2, 3, 4)
    assert job.block_hashes == hashes(4)[1:]


def test_a_lookup_that_is_late_counts_as_a_miss_and_its_lease_is_given_back() -> None:
    play = Play()
    commands = play.add("a", 100)
    play.later(99)
    assert play.ask("a", 100).num_tokens is None
    play.later(1)
    assert play.ask("a", 100).reason == LOOKUP_TIMEOUT
    lookup_id = told(commands, Lookup)[0].lookup_id
    assert told(play.found(commands, 3), ReleaseLookup) == [ReleaseLookup(lookup_id=lookup_id)]
    assert play.ask("a", 100).reason == LOOKUP_TIMEOUT
    assert play.core.counters["lookups_late"] == 1


def test_an_answer_that_is_too_old_is_looked_up_again_once() -> None:
    play = Play()
    play.found(play.add("a", 100), 3)
    play.later(4999)
    assert play.ask("a", 100).num_tokens == 48
    play.later(1)
    commands = play.ask_all("a", 100)
    assert answer(commands).num_tokens is None
    assert len(told(commands, ReleaseLookup)) == 1
    assert play.ask_all("a", 100) == [answer(commands)]
    play.found(commands, 5)
    assert play.ask("a", 100).num_tokens == 80
    assert play.core.counters["lookups"] == 2


def test_an_unknown_request_is_taken_in_when_it_is_asked_about() -> None:
    play = Play()
    commands = play.ask_all("a", 100, 0, hashes(6))
    assert answer(commands).num_tokens is None
    play.found(commands, 6)
    assert play.ask("a", 100).num_tokens == 96


def test_a_resumed_request_is_looked_up_with_what_it_has_generated() -> None:
    play = Play()
    play.admit("a", 40, 0, [1, 2, 3])
    play.step(1, new("a", [1, 2, 3], 0, 40))
    play.step(2, preempted=("a",))
    commands = play.ask_all("a", 70, 0, hashes(4))
    assert told(commands, Lookup)[0].groups[0].block_hashes == hashes(4)
    play.found(commands, 4)
    assert play.ask("a", 70).num_tokens == 64


def test_hashes_that_do_not_continue_the_old_ones_drop_the_hit() -> None:
    play = Play()
    play.found(play.add("a", 100), 6)
    commands = play.ask_all("a", 48, 0, hashes(3, "q"))
    assert len(told(commands, ReleaseLookup)) == 1
    assert answer(commands).num_tokens is None


def test_a_miss_says_the_daemons_reason() -> None:
    play = Play()
    play.found(play.add("a", 100), 0, reason=EVICTED)
    assert play.ask("a", 100).reason == EVICTED
    play.found(play.add("b", 100, "q"), 0)
    assert play.ask("b", 100).reason == NOT_STORED
    play.alloc("b", [1])
    assert play.core.counters["misses.not-stored"] == 1


@pytest.mark.parametrize(
    ("load", "safe", "staged", "asynchronous"),
    [
        ("auto", True, False, False),
        # Staged or not: its daemon may die.
        ("auto", False, True, True),
        ("auto", False, False, True),
        ("layerwise", False, False, False),
        ("async", True, True, True),
    ],
)
def test_the_path_is_chosen_by_what_is_safe(
    load: str, safe: bool, staged: bool, asynchronous: bool
) -> None:
    play = Play(load=load, sync_is_safe=safe)
    play.found(play.add("a", 100), 3, staged=staged)
    match = play.ask("a", 100)
    assert (match.num_tokens, match.asynchronous) == (48, asynchronous)
    play.alloc("a", [1, 2, 3], 48)
    commands = play.step(1)
    assert loads(commands)[0].layerwise is not asynchronous
    told_model = model(commands)
    assert told_model is not None
    assert told_model.loads[0].layerwise is not asynchronous


def test_roles_and_requests_that_must_not_load_are_not_looked_up() -> None:
    play = Play(can_load=False)
    assert play.add("a", 100) == []
    assert play.ask("a", 100).reason == ROLE
    play = Play()
    assert play.add("a", 100, skip_lookup=True) == []
    assert play.ask("a", 100).reason == ROLE


def test_nothing_is_looked_up_before_every_rank_is_attached() -> None:
    play = Play(ranks=2, ready=False)
    assert play.add("a", 100) == []
    assert play.ask("a", 100).reason == DAEMON_NOT_ATTACHED
    play.ready()
    play.daemon(1, attached=False)
    assert play.ask("a", 100).reason == DAEMON_NOT_ATTACHED
    play.daemon(1)
    assert play.ask("a", 100).num_tokens is None


def test_a_lost_daemon_or_a_store_that_is_down_answers_0() -> None:
    play = Play(ranks=2)
    play.found(play.add("a", 100), 3)
    play.say(StoreChanged(now_ns=play.now_ns, rank=1, up=False))
    assert play.ask("a", 100).reason == STORE_DOWN
    play.say(StoreChanged(now_ns=play.now_ns, rank=1, up=True))
    assert play.ask("a", 100).num_tokens == 48
    play.lost(1, dead=False)
    assert play.ask("a", 100).reason == DAEMON_LOST


def test_losing_the_daemon_that_answered_forgets_its_answers() -> None:
    play = Play()
    commands = play.add("a", 100)
    play.found(play.add("b", 100, "q"), 3)
    play.lost(0, dead=False)
    play.daemon(0)
    assert len(told(play.ask_all("b", 100), Lookup)) == 1
    assert len(told(play.ask_all("a", 100), Lookup)) == 1
    assert len(told(play.found(commands, 3), ReleaseLookup)) == 1


def test_a_hit_that_vllm_does_not_use_is_released() -> None:
    play = Play()
    play.found(play.add("a", 100), 3)
    play.ask("a", 100)
    assert len(told(play.alloc("a", [1]), ReleaseLookup)) == 1
    assert told(play.alloc("a", [1, 2]), ReleaseLookup) == []
    assert play.core.counters["hits_unused"] == 1


def test_a_shrunk_hit_loads_only_what_vllm_counts_on() -> None:
    play = Play()
    play.found(play.add("a", 200), 10)
    assert play.ask("a", 200, SIZE).num_tokens == 144
    play.alloc("a", range(1, 11), 33)
    (job,) = loads(play.step(1, new("a", range(1, 11), 49, 100)))
    assert job.block_ids == (2, 3, 4)


def test_more_than_was_offered_is_refused_and_changes_nothing() -> None:
    play = Play()
    play.found(play.add("a", 100), 3)
    play.ask("a", 100)
    with pytest.raises(LocalProtocolError, match="49 external tokens; 48 were offered"):
        play.alloc("a", range(1, 8), 49)
    with pytest.raises(LocalProtocolError, match="2 blocks for a load up to block 3"):
        play.alloc("a", [1, 2], 48)
    with pytest.raises(LocalProtocolError, match="0 were offered"):
        play.alloc("x", range(1, 8), 16)
    play.alloc("a", range(1, 8), 48)
    assert play.core.wants_step


def test_short_hits_are_not_worth_loading() -> None:
    play = Play(min_load_blocks=3)
    play.found(play.add("a", 100), 3)
    assert play.ask("a", 100, 0).num_tokens == 48
    assert play.ask("a", 100, 16).reason == NOT_WORTH_LOADING


def test_the_rest_of_the_last_block_is_not_loaded_on_top_of_a_local_prefix() -> None:
    play = Play()
    play.found(play.add("a", 64), 4)
    assert play.ask("a", 64, 48).reason == NOT_WORTH_LOADING
    assert play.ask("a", 64, 32).num_tokens == 31


def test_auto_does_not_load_what_is_computed_faster_and_stays_with_its_answer() -> None:
    play = Play(num_bytes_per_block=1_000_000)
    play.core._state.worth.load_measured(1_000_000, 1_000_000)  # 1 s a block
    play.core._state.worth.step_measured(1000, 1_000_000_000)  # 16 ms a block
    play.found(play.add("a", 100), 3)
    assert {play.ask("a", 100).reason for _ in range(40)} == {NOT_WORTH_LOADING}
    play.core._state.worth.load_measured(10**9, 1)
    assert play.ask("a", 100).reason == NOT_WORTH_LOADING
    assert play.ask("a", 100, 16).num_tokens == 32


def test_a_request_whose_load_failed_is_not_loaded_again() -> None:
    play = Play()
    play.admit("a", 100, 3, range(1, 8))
    (job,) = loads(play.step(1, new("a", range(1, 8), 48, 52)))
    play.end(job.job_id, failed=(2,))
    play.done(1, 2)
    play.step(2, preempted=("a",))
    assert play.ask("a", 100).reason == LOAD_FAILED_BEFORE
    assert play.core.counters["requests_barred"] == 1


def test_ending_a_request_gives_its_hit_back() -> None:
    play = Play()
    commands = play.add("a", 100)
    assert told(play.finish("a"), ReleaseLookup) == []
    assert len(told(play.found(commands, 2), ReleaseLookup)) == 1
    play.found(play.add("b", 100), 3)
    assert len(told(play.finish("b"), ReleaseLookup)) == 1


def test_a_request_id_that_comes_back_starts_anew() -> None:
    play = Play()
    play.found(play.add("a", 100), 3)
    commands = play.add("a", 100, "q")
    assert len(told(commands, ReleaseLookup)) == 1
    assert told(commands, Lookup)[0].groups[0].block_hashes == hashes(6, "q")
