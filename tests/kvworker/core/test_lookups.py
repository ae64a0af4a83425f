"""Lookups: the longest prefix that every rank has, in one store call."""

from kvcommon.messages import (
    Detach,
    GroupHit,
    Lookup,
    LookupGroup,
    LookupResult,
    ReleaseLookup,
    ResetStore,
)
from kvworker.core.commands import ClosePuts, FindKeys, OpenPuts, WriteLayers
from kvworker.outcome import Outcome
from tests.support.playbook import (
    MARK,
    SCHEDULER,
    Playbook,
    block_hash,
    key,
    kinds,
    only,
    said,
    save,
    started,
)

OK, MISS, DOWN = Outcome.OK, Outcome.MISS, Outcome.DOWN
OTHER = "f" * 24


def lookup(*numbers: int, lookup_id: int = 1, group: int = 0) -> Lookup:
    groups = (LookupGroup(group=group, block_hashes=tuple(map(block_hash, numbers))),)
    return Lookup(lookup_id=lookup_id, request_id="r", groups=groups)


def two_ranks() -> Playbook:
    play = Playbook()
    play.attach()
    play.hello(marks=(MARK, OTHER))
    return play


def test_all_ranks_are_asked_for_in_one_call() -> None:
    find = only(two_ranks().scheduler(lookup(40, 50)), FindKeys)
    assert find.keys == (key(40), key(40, OTHER), key(50), key(50, OTHER))


def test_the_hit_ends_where_any_rank_misses() -> None:
    play = two_ranks()
    find = only(play.scheduler(lookup(40, 50, 60)), FindKeys)
    result = said(play.answer(find, [OK, OK, OK, MISS, OK, OK], local=True), LookupResult)
    assert result == LookupResult(
        lookup_id=1, hits=(GroupHit(group=0, num_blocks=1),), staged=True, reason="not-stored"
    )


def test_a_full_hit_has_no_reason() -> None:
    play = started()
    result = said(play.answer(only(play.scheduler(lookup(40, 50)), FindKeys)), LookupResult)
    assert (result.hits[0].num_blocks, result.reason, result.staged) == (2, "", False)


def test_no_hit_is_never_staged() -> None:
    play = started()
    find = only(play.scheduler(lookup(40)), FindKeys)
    assert not said(play.answer(find, MISS, local=True), LookupResult).staged


def test_each_group_has_its_own_prefix() -> None:
    play = started()
    groups = (
        LookupGroup(group=0, block_hashes=(block_hash(40), block_hash(50))),
        LookupGroup(group=1, block_hashes=(block_hash(60),)),
    )
    asked = play.scheduler(Lookup(lookup_id=1, request_id="r", groups=groups))
    find = only(asked, FindKeys)
    assert find.keys == (key(40), key(50), key(60, group=1))
    result = said(play.answer(find, [MISS, OK, OK]), LookupResult)
    assert [(hit.group, hit.num_blocks) for hit in result.hits] == [(0, 0), (1, 1)]


def test_a_store_that_does_not_answer_is_no_miss() -> None:
    play = started()
    find = only(play.scheduler(lookup(40, 50)), FindKeys)
    result = said(play.answer(find, [OK, DOWN]), LookupResult)
    assert (result.hits[0].num_blocks, result.reason) == (1, "store-down")


def test_without_an_attached_model_side_the_store_is_not_asked() -> None:
    play = Playbook()
    play.hello()
    commands = play.scheduler(lookup(40))
    assert kinds(commands) == ["LookupResult → scheduler"]
    result = said(commands, LookupResult)
    assert (result.hits[0].num_blocks, result.reason) == (0, "daemon-not-attached")


def test_while_the_store_is_down_it_is_not_asked() -> None:
    play = started()
    play.store_down()
    result = said(play.scheduler(lookup(40)), LookupResult)
    assert (result.hits[0].num_blocks, result.reason) == (0, "store-down")


def test_what_is_to_be_removed_is_no_hit() -> None:
    play = started()
    play.begin(1)
    play.computed(1)
    write = only(play.answer(only(play.plan(1, save(1, {4: 40})), OpenPuts)), WriteLayers)
    play.answer(write)
    close = only(play.verdict(1), ClosePuts)
    play.scheduler(ResetStore())
    assert said(play.scheduler(lookup(40)), LookupResult).reason == "not-stored"
    assert "ResetNamespace" in kinds(play.answer(close))
    assert "FindKeys" in kinds(play.scheduler(lookup(40))), "it comes after the removal"


def test_an_empty_lookup_is_answered_at_once() -> None:
    result = said(started().scheduler(lookup()), LookupResult)
    assert (result.hits, result.reason) == ((GroupHit(group=0, num_blocks=0),), "")


def test_ranks_that_nobody_named_have_nothing() -> None:
    play = Playbook()
    play.attach()
    play.hello(marks=())
    assert said(play.scheduler(lookup(40)), LookupResult).reason == "daemon-not-attached"


def test_too_many_lookups_at_once() -> None:
    play = started(max_lookups=1)
    play.scheduler(lookup(40))
    assert said(play.scheduler(lookup(50, lookup_id=2)), LookupResult).reason == "overload"


def test_a_repeated_lookup_is_counted_and_ignored() -> None:
    play = started()
    play.scheduler(lookup(40))
    assert play.scheduler(lookup(40)) == []
    counters = play.core.status().metrics
    assert counters['kvferry_protocol_errors_total{what="repeated-lookup"}'] == 1


def test_a_lookup_may_be_released_at_any_time() -> None:
    play = started()
    assert play.scheduler(ReleaseLookup(lookup_id=77)) == []
    find = only(play.scheduler(lookup(40)), FindKeys)
    assert play.scheduler(ReleaseLookup(lookup_id=1)) == []
    assert kinds(play.answer(find)) == ["LookupResult → scheduler"]
    assert play.scheduler(ReleaseLookup(lookup_id=1)) == []


def test_the_model_side_leaves_meanwhile() -> None:
    play = started()
    find = only(play.scheduler(lookup(40)), FindKeys)
    play.model(Detach())
    result = said(play.answer(find), LookupResult)
    assert (result.hits[0].num_blocks, result.reason) == (0, "daemon-not-attached")


def test_an_answer_for_a_scheduler_side_that_is_gone_is_dropped() -> None:
    play = started()
    find = only(play.scheduler(lookup(40)), FindKeys)
    play.hello(epoch=SCHEDULER + 1)
    assert play.answer(find) == []


def test_an_answer_after_the_same_scheduler_side_came_back_counts() -> None:
    play = started()
    find = only(play.scheduler(lookup(40)), FindKeys)
    play.lose("scheduler")
    play.hello()
    assert kinds(play.answer(find)) == ["LookupResult → scheduler"]
