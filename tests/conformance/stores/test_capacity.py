"""A store that is full: it says so, forgets what is old, keeps what is in use."""

import time

import pytest

from kvworker.outcome import Outcome
from kvworker.stores.base import Store
from tests.conformance.stores.conftest import MIB, Make
from tests.support.arena import Arena, get, put

#: Mooncake's smallest segment.
LIMIT = 16 * MIB
SIZE = MIB


@pytest.fixture
def store(make_store: Make) -> Store:
    return make_store(LIMIT)


@pytest.fixture
def source(store: Store) -> Arena:
    arena = Arena(SIZE, count=1, seed=5)
    assert store.register(arena.address, arena.size)
    return arena


def _put_until(store: Store, source: Arena, key: str, wanted: Outcome) -> None:
    """Try to store an object until the answer is as wanted (eviction takes its time)."""
    deadline = time.monotonic() + 20
    while (answer := store.put_objects([source.piece(key)])[0]) is not wanted:
        assert time.monotonic() < deadline, f"{key}: {answer}, not {wanted}"


def test_open_puts_fill_it_and_revoking_makes_room(store: Store, source: Arena) -> None:
    keys = [f"fill-{i}" for i in range(2 * LIMIT // SIZE)]
    answer = store.put_start(keys, [SIZE] * len(keys))
    assert set(answer) == {Outcome.OK, Outcome.FULL}
    opened = [key for key, outcome in zip(keys, answer, strict=True) if outcome is Outcome.OK]
    assert len(opened) * SIZE <= LIMIT
    refused = keys[len(opened)]
    assert store.put_start([refused], [SIZE]) == [Outcome.FULL]
    assert store.put_ranges([source.piece(refused)]) == [Outcome.FAILED]
    assert set(store.put_revoke(opened)) == {Outcome.OK}
    _put_until(store, source, refused, Outcome.OK)


def test_an_object_larger_than_the_store_is_refused(store: Store) -> None:
    assert store.put_start(["huge"], [2 * LIMIT]) == [Outcome.FULL]


def test_old_objects_make_room_for_new_ones(store: Store, source: Arena) -> None:
    keys = [f"turn-{i}" for i in range(3 * LIMIT // SIZE)]
    for key in keys:
        _put_until(store, source, key, Outcome.OK)
    answer = store.find(keys)
    assert answer[-1] is Outcome.OK
    assert Outcome.MISS in answer
    assert answer.count(Outcome.OK) * SIZE <= LIMIT


def test_what_somebody_reads_is_not_evicted(store: Store, source: Arena) -> None:
    target = Arena(SIZE)
    store.register(target.address, target.size)
    put(store, source, "held")
    assert store.get_start(["held"]) == [Outcome.OK]
    for i in range(3 * LIMIT // SIZE):
        _put_until(store, source, f"push-{i}", Outcome.OK)
    assert store.get_ranges([target.piece("held")]) == [Outcome.OK]
    assert target.object() == source.object()
    store.get_end(["held"])


def test_an_object_of_the_wrong_size_makes_way_for_a_good_one(store: Store, source: Arena) -> None:
    target = Arena(SIZE)
    store.register(target.address, target.size)
    store.put_start(["cut"], [SIZE // 2])
    store.put_ranges([source.piece("cut", 0, 0, SIZE // 2)])
    assert store.put_end(["cut"]) == [Outcome.OK]
    assert store.get_start(["cut"], [SIZE]) == [Outcome.MISS]
    deadline = time.monotonic() + 60
    while store.put_start(["cut"], [SIZE]) != [Outcome.OK]:  # Mooncake: until the lease is over
        assert time.monotonic() < deadline, "it is still in the way"
        time.sleep(0.02)
    store.put_ranges([source.piece("cut")])
    assert store.put_end(["cut"]) == [Outcome.OK]
    assert store.find(["cut"]) == [Outcome.OK]
    assert store.get_start(["cut"], [SIZE]) == [Outcome.OK]
    assert store.get_ranges([target.piece("cut")]) == [Outcome.OK]
    assert target.object() == source.object()
    store.get_end(["cut"])


def test_a_batch_that_lost_some_keys_reads_the_others(store: Store, source: Arena) -> None:
    keys = [f"some-{i}" for i in range(2 * LIMIT // SIZE)]
    for key in keys:
        _put_until(store, source, key, Outcome.OK)
    target = Arena(SIZE, count=len(keys))
    store.register(target.address, target.size)
    answer = store.get_start(keys)
    assert set(answer) == {Outcome.OK, Outcome.MISS}
    alive = [key for key, outcome in zip(keys, answer, strict=True) if outcome is Outcome.OK]
    pieces = [target.piece(key, i) for i, key in enumerate(alive)]
    assert store.get_ranges(pieces) == [Outcome.OK] * len(alive)
    store.get_end(alive)
    assert get(store, target, alive[0]) == source.object()
