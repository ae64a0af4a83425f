"""What every store does with objects that are being written."""

from collections.abc import Callable

import pytest

from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO, Store
from tests.support.arena import Arena, get, put

OK, MISS, EXISTS, FAILED = Outcome.OK, Outcome.MISS, Outcome.EXISTS, Outcome.FAILED

LAYERS = 4
LAYER = 4096


@pytest.fixture
def store(shared_store: Store) -> Store:
    return shared_store


@pytest.fixture
def source(arena: Callable[..., Arena]) -> Arena:
    return arena(LAYERS * LAYER, count=8, seed=1)


@pytest.fixture
def target(arena: Callable[..., Arena]) -> Arena:
    return arena(LAYERS * LAYER, count=8)


def test_layers_written_one_by_one_come_back_whole(
    store: Store, source: Arena, target: Arena
) -> None:
    keys = ["put-a", "put-b"]
    assert store.put_start(keys, [LAYERS * LAYER] * 2) == [OK, OK]
    for layer in reversed(range(LAYERS)):
        pieces = [source.layers(k, i, range(layer, layer + 1), LAYER) for i, k in enumerate(keys)]
        assert store.put_ranges(pieces) == [OK, OK]
    assert store.put_end(keys) == [OK, OK]
    assert get(store, target, "put-a", 0) == source.object(0)
    assert get(store, target, "put-b", 1) == source.object(1)


def test_two_pieces_of_one_object_in_one_call(store: Store, source: Arena, target: Arena) -> None:
    assert store.put_start(["twice"], [LAYERS * LAYER]) == [OK]
    pieces = [source.piece("twice", 0, 0, LAYER), source.piece("twice", 0, LAYER)]
    assert store.put_ranges(pieces) == [OK, OK]
    assert store.put_end(["twice"]) == [OK]
    assert get(store, target, "twice") == source.object()


def test_an_object_is_invisible_until_it_is_ended(store: Store, source: Arena) -> None:
    store.put_start(["hidden"], [source.object_size])
    store.put_ranges([source.piece("hidden")])
    assert store.find(["hidden"]) == [MISS]
    assert store.get_start(["hidden"]) == [MISS]
    assert not store.is_local(["hidden"])
    store.put_end(["hidden"])
    assert store.find(["hidden"]) == [OK]


def test_a_revoked_object_never_was_and_its_key_is_free(
    store: Store, source: Arena, target: Arena
) -> None:
    store.put_start(["gone"], [source.object_size])
    store.put_ranges([source.piece("gone", 0)])
    assert store.put_revoke(["gone"]) == [OK]
    assert store.find(["gone"]) == [MISS]
    assert store.put_end(["gone"]) == [FAILED]
    assert store.put_start(["gone"], [source.object_size]) == [OK]
    store.put_ranges([source.piece("gone", 1)])
    store.put_end(["gone"])
    assert get(store, target, "gone") == source.object(1)


def test_a_stored_key_is_not_written_again(store: Store, source: Arena, target: Arena) -> None:
    put(store, source, "once")
    assert store.put_start(["once"], [source.object_size]) == [EXISTS]
    assert store.put_ranges([source.piece("once", 1)]) == [FAILED]
    assert store.put_end(["once"]) == [FAILED]
    assert get(store, target, "once") == source.object(0)


def test_a_key_open_for_writing_cannot_be_opened_again(store: Store, source: Arena) -> None:
    size = source.object_size
    assert store.put_start(["open"], [size]) == [OK]
    assert store.put_start(["open"], [size]) == [EXISTS]
    assert store.put_ranges([source.piece("open")]) == [OK]
    assert store.put_end(["open"]) == [OK]


def test_a_key_named_twice_in_a_call_is_opened_once(store: Store, source: Arena) -> None:
    size = source.object_size
    assert store.put_start(["double", "double"], [size, size]) == [OK, EXISTS]
    assert store.put_revoke(["double"]) == [OK]


def test_one_batch_can_hold_every_kind_of_key(store: Store, source: Arena) -> None:
    put(store, source, "mixed-stored")
    size = source.object_size
    keys = ["mixed-stored", "mixed-new", "mixed-empty", "mixed-new-too"]
    answer = store.put_start(keys, [size, size, 0, size])
    assert answer == [EXISTS, OK, FAILED, OK]
    pieces = [source.piece(key, i) for i, key in enumerate(keys)]
    assert store.put_ranges(pieces) == [FAILED, OK, FAILED, OK]
    assert store.put_end(["mixed-new"]) == [OK]
    assert store.put_revoke(["mixed-new-too", "mixed-empty"]) == [OK, FAILED]
    assert store.find(keys) == [OK, OK, MISS, MISS]


def test_an_object_that_misses_bytes_is_discarded(store: Store, source: Arena) -> None:
    store.put_start(["holes"], [source.object_size])
    store.put_ranges([source.piece("holes", 0, 0, source.object_size - 1)])
    assert store.put_end(["holes"]) == [FAILED]
    assert store.find(["holes"]) == [MISS]
    assert store.put_start(["holes"], [source.object_size]) == [OK]
    store.put_revoke(["holes"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda piece: piece._replace(offsets=[1]),
        lambda piece: piece._replace(offsets=[-1]),
        lambda piece: piece._replace(offsets=[]),
        lambda piece: piece._replace(sizes=[0]),
        lambda piece: piece._replace(sizes=[1, 2]),
        lambda piece: piece._replace(key="never-opened"),
    ],
)
def test_a_piece_that_does_not_fit_fails_alone(
    store: Store, source: Arena, spoil: Callable[[RangeIO], RangeIO]
) -> None:
    size = source.object_size
    store.put_start(["bad", "good"], [size, size])
    assert store.put_ranges([spoil(source.piece("bad")), source.piece("good", 1)]) == [FAILED, OK]
    assert store.put_revoke(["bad", "good"]) == [OK, OK]


def test_what_was_never_opened_cannot_be_ended(store: Store) -> None:
    assert store.put_end(["nobody"]) == [FAILED]
    assert store.put_revoke(["nobody"]) == [FAILED]


def test_empty_calls_are_allowed(store: Store) -> None:
    assert store.put_start([], []) == []
    assert store.put_ranges([]) == []
    assert store.put_end([]) == []
    assert store.put_revoke([]) == []
    assert store.put_objects([]) == []


def test_whole_objects_are_stored_in_one_call(store: Store, source: Arena, target: Arena) -> None:
    size = source.object_size
    store.put_start(["whole-open"], [size])
    pieces = [
        source.layers("whole-a", 0, range(LAYERS), LAYER),
        source.piece("whole-part", 1, LAYER),
        source.piece("whole-open", 2),
        source.piece("whole-b", 3),
    ]
    assert store.put_objects(pieces) == [OK, FAILED, EXISTS, OK]
    store.put_revoke(["whole-open"])
    assert store.find(["whole-a", "whole-part", "whole-open", "whole-b"]) == [OK, MISS, MISS, OK]
    assert get(store, target, "whole-a", 0) == source.object(0)
    assert get(store, target, "whole-b", 3) == source.object(3)


def test_whole_objects_do_not_replace_stored_ones(
    store: Store, source: Arena, target: Arena
) -> None:
    put(store, source, "kept")
    assert store.put_objects([source.piece("kept", 1)])[0] in {OK, EXISTS}
    assert get(store, target, "kept") == source.object(0)


def test_a_big_batch(store: Store, arena: Callable[..., Arena]) -> None:
    count, size = 3000, 512
    source, target = arena(size, count, seed=2), arena(size, count)
    keys = [f"big-{i}" for i in range(count)]
    put(store, source, *keys)
    assert store.find(keys) == [OK] * count
    assert store.get_start(keys) == [OK] * count
    assert store.get_ranges([target.piece(k, i) for i, k in enumerate(keys)]) == [OK] * count
    store.get_end(keys)
    assert target.memory[:] == source.memory[:]


def test_whole_objects_of_very_many_pieces(store: Store, arena: Callable[..., Arena]) -> None:
    count, layers, layer = 40, 64, 256
    source, target = arena(layers * layer, count, seed=3), arena(layers * layer, count)
    keys = [f"pieces-{i}" for i in range(count)]
    pieces = [source.layers(key, i, range(layers), layer) for i, key in enumerate(keys)]
    assert store.put_objects(pieces) == [OK] * count
    assert store.get_start(keys) == [OK] * count
    pieces = [target.layers(key, i, range(layers), layer) for i, key in enumerate(keys)]
    assert store.get_ranges(pieces) == [OK] * count
    store.get_end(keys)
    assert target.memory[:] == source.memory[:]
