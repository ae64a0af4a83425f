"""What every store does with objects that are being read."""

import ctypes
import secrets
from collections.abc import Callable

import pytest

from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO, Store
from tests.support.arena import Arena, get, put

OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED

SIZE = 16384


@pytest.fixture
def store(shared_store: Store) -> Store:
    return shared_store


@pytest.fixture
def source(arena: Callable[..., Arena]) -> Arena:
    return arena(SIZE, count=4, seed=3)


@pytest.fixture
def target(arena: Callable[..., Arena]) -> Arena:
    return arena(SIZE, count=4)


def test_a_missing_key_is_a_miss(store: Store, source: Arena) -> None:
    put(store, source, "there")
    assert store.find(["there", "missing"]) == [OK, MISS]
    assert store.get_start(["missing", "there"]) == [MISS, OK]
    assert store.get_ranges([source.piece("missing")]) == [FAILED]
    store.get_end(["there"])


def test_part_of_an_object_can_be_read(store: Store, source: Arena, target: Arena) -> None:
    put(store, source, "part")
    store.get_start(["part"])
    piece = RangeIO("part", [target.address, target.address + 5000], [100, 50], [9000, 1])
    assert store.get_ranges([piece]) == [OK]
    store.get_end(["part"])
    assert target.memory[:100] == source.object()[9000:9100]
    assert target.memory[5000:5050] == source.object()[1:51]
    assert target.memory[100:5000] == bytes(4900)


def test_two_readers_share_a_session_and_end_it_once_each(
    store: Store, source: Arena, target: Arena
) -> None:
    put(store, source, "shared")
    assert store.get_start(["shared"]) == [OK]
    assert store.get_start(["shared"]) == [OK]
    store.get_end(["shared"])
    assert store.get_ranges([target.piece("shared")]) == [OK]
    assert target.object() == source.object()
    store.get_end(["shared"])
    assert store.get_ranges([target.piece("shared")]) == [FAILED]


def test_a_key_named_twice_counts_twice(store: Store, source: Arena, target: Arena) -> None:
    put(store, source, "pair")
    assert store.get_start(["pair", "pair"]) == [OK, OK]
    assert store.get_ranges([target.piece("pair", 0), target.piece("pair", 0)]) == [OK, OK]
    store.get_end(["pair"])
    assert store.get_ranges([target.piece("pair")]) == [OK]
    store.get_end(["pair", "pair"])
    assert store.get_ranges([target.piece("pair")]) == [FAILED]


def test_one_object_can_be_read_into_two_places_at_once(
    store: Store, source: Arena, target: Arena
) -> None:
    put(store, source, "fan")
    store.get_start(["fan"])
    places = [target.address, target.address + SIZE]
    assert store.get_ranges([RangeIO("fan", [at], [SIZE], [0]) for at in places]) == [OK, OK]
    store.get_end(["fan"])
    assert target.object(0) == target.object(1) == source.object()


@pytest.mark.parametrize(
    ("sizes", "offsets"), [([SIZE], [1]), ([SIZE + 1], [0]), ([10], [-1]), ([], []), ([10], [0, 5])]
)
def test_a_piece_that_does_not_fit_fails_alone(
    store: Store, source: Arena, target: Arena, sizes: list[int], offsets: list[int]
) -> None:
    short, fine = (f"{word}-{secrets.token_hex(4)}" for word in ("short", "fine"))
    put(store, source, short, fine)
    store.get_start([short, fine])
    bad = RangeIO(short, [target.address] * len(sizes), sizes, offsets)
    assert store.get_ranges([bad, target.piece(fine, 1)]) == [FAILED, OK]
    assert target.object(1) == source.object(1)
    assert store.get_ranges([target.piece(short)]) == [OK]
    store.get_end([short, fine])


def test_local_bytes_equal_those_that_were_put(store: Store, source: Arena) -> None:
    put(store, source, "near", "nearer")
    assert store.is_local(["near", "nearer"])
    assert not store.is_local(["near", "absent"])
    assert store.local("near") is None, "no session is open"
    store.get_start(["near", "nearer"])
    for i, key in enumerate(["near", "nearer"]):
        found = store.local(key)
        assert found is not None
        assert found.size == SIZE
        assert ctypes.string_at(found.address, SIZE) == source.object(i)
        assert store.local(key) == found
    store.get_end(["near"])
    assert store.local("near") is None
    assert store.local("nearer") is not None
    store.get_end(["nearer"])


def test_a_reader_that_ends_too_often_harms_nobody(
    store: Store, source: Arena, target: Arena
) -> None:
    put(store, source, "calm")
    store.get_end(["calm", "unknown"])
    assert get(store, target, "calm") == source.object()


def test_a_prefix_is_removed_and_nothing_else(store: Store, source: Arena) -> None:
    keys = ["rm-a.b-1", "rm-a.b-2", "rm-axb-1", "x-rm-a.b-1"]
    put(store, source, *keys)
    assert store.remove_prefix("rm-a.b-") == 2
    assert store.find(keys) == [MISS, MISS, OK, OK]
    assert store.remove_prefix("rm-a.b-") == 0
    assert store.remove_prefix("") == 0
    assert store.find(keys[2:]) == [OK, OK]


@pytest.mark.parametrize("mark", list("^$\\.*+?()[]{}|/-"))
def test_marks_of_regular_expressions_mean_themselves(
    store: Store, source: Arena, mark: str
) -> None:
    start = f"re-{ord(mark)}-q"
    put(store, source, f"{start}{mark}z", f"{start}qz")
    assert store.remove_prefix(f"{start}{mark}") == 1
    assert store.find([f"{start}{mark}z", f"{start}qz"]) == [MISS, OK]


@pytest.mark.parametrize("size", [SIZE // 2, SIZE - 1, SIZE + 1])
def test_an_object_of_the_wrong_size_counts_as_not_stored(
    store: Store, source: Arena, arena: Callable[..., Arena], size: int
) -> None:
    wrong, fine = (f"{word}-{size}" for word in ("wrong", "fine"))
    put(store, arena(size, seed=5), wrong)
    put(store, source, fine)
    assert store.find([wrong, fine]) == [OK, OK]
    assert store.get_start([wrong, fine], [SIZE, SIZE]) == [MISS, OK]
    assert store.local(wrong) is None
    assert store.find([wrong, fine]) == [MISS, OK]
    assert store.get_start([fine], [SIZE]) == [OK], "and again, while it is open"
    assert store.get_start([fine], [SIZE - 1]) == [MISS]
    store.get_end([fine, fine])
    assert store.metrics()["objects_of_wrong_size"] >= 2


def test_a_removed_object_can_be_stored_anew(
    store: Store, source: Arena, target: Arena, arena: Callable[..., Arena]
) -> None:
    put(store, source, "anew")
    assert store.remove_prefix("anew") == 1
    other = arena(SIZE // 2, seed=4)
    put(store, other, "anew")
    store.get_start(["anew"])
    assert store.get_ranges([target.piece("anew", 0, 0, SIZE // 2)]) == [OK]
    store.get_end(["anew"])
    assert target.memory[: SIZE // 2] == other.object()
