"""The breaker: opens after several silent answers, is closed by a probe alone."""

import pytest

from kvcommon.messages import Lookup, LookupGroup, StoreHealth, StoreState
from kvworker.core.commands import FindKeys, OpenPuts, ProbeStore, WorkerCommand
from kvworker.outcome import Outcome
from tests.support.playbook import Playbook, block_hash, kinds, only, said, save, started


def find(play: Playbook, outcome: Outcome, lookup_id: int) -> list[WorkerCommand]:
    groups = (LookupGroup(group=0, block_hashes=(block_hash(1),)),)
    asked = play.scheduler(Lookup(lookup_id=lookup_id, request_id="r", groups=groups))
    return play.answer(only(asked, FindKeys), outcome)


def test_so_many_in_a_row_open_it() -> None:
    play = started(store_down_after=3)
    assert kinds(find(play, Outcome.DOWN, 1)) == ["LookupResult → scheduler"]
    find(play, Outcome.DOWN, 2)
    health = said(find(play, Outcome.DOWN, 3), StoreHealth)
    assert health == StoreHealth(state=StoreState.DOWN, reason="store-down")


@pytest.mark.parametrize("sign", [Outcome.OK, Outcome.MISS, Outcome.EXPIRED])
def test_a_sign_of_life_in_between_starts_the_count_anew(sign: Outcome) -> None:
    play = started(store_down_after=2)
    find(play, Outcome.DOWN, 1)
    find(play, sign, 2)
    assert kinds(find(play, Outcome.DOWN, 3)) == ["LookupResult → scheduler"]


@pytest.mark.parametrize("nothing", [Outcome.FAILED, Outcome.CANCELLED])
def test_what_says_nothing_of_the_store_does_not_count(nothing: Outcome) -> None:
    play = started(store_down_after=2)
    find(play, Outcome.DOWN, 1)
    find(play, nothing, 2)
    assert "StoreHealth → scheduler" in kinds(find(play, Outcome.DOWN, 3))


def test_saves_count_too() -> None:
    play = started(store_down_after=1)
    play.plan(1, save(1, {4: 40}))
    commands = play.answer(only(play.begin(1), OpenPuts), Outcome.DOWN)
    assert kinds(commands) == ["StoreHealth → scheduler", "JobsEnded → scheduler"]


def test_probes_come_at_intervals_and_one_at_a_time() -> None:
    play = started(probe_interval_ms=1000)
    assert play.tick(5000) == [], "the store is up"
    play.store_down()
    assert play.tick(900) == []
    probe = only(play.tick(200), ProbeStore)
    assert play.tick(5000) == [], "it has not answered"
    assert play.answer(probe, state=StoreState.DOWN) == []
    assert play.tick(900) == []
    assert kinds(play.tick(200)) == ["ProbeStore"]


def test_a_probe_closes_it_and_every_scheduler_side_hears_of_it() -> None:
    play = started()
    play.hello(engine="other#0")
    assert kinds(play.store_down()).count("StoreHealth → scheduler") == 2
    play.lose("scheduler", engine="other#0")
    commands = play.store_up()
    assert kinds(commands) == ["StoreHealth → scheduler"]
    assert said(commands, StoreHealth) == StoreHealth(state=StoreState.UP)
    assert "LookupResult → scheduler" in kinds(find(play, Outcome.OK, 50))


def test_a_late_answer_of_a_store_that_is_down_does_not_close_it() -> None:
    play = started()
    groups = (LookupGroup(group=0, block_hashes=(block_hash(1),)),)
    early = only(play.scheduler(Lookup(lookup_id=1, request_id="r", groups=groups)), FindKeys)
    play.store_down()
    assert kinds(play.answer(early)) == ["LookupResult → scheduler"]
    assert play.core.status().store_state is StoreState.DOWN
