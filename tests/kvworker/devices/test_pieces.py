import msgspec
import pytest

from kvcommon.errors import HandleError
from kvcommon.layout import CacheLayout, GroupLayout
from kvworker.devices.base import MappedStorage, Packed
from kvworker.devices.pieces import GroupPieces, check_layout, copies, packed_copies, packed_range
from tests.kvworker.devices.layouts import (
    LAYOUTS,
    NUM_BLOCKS,
    NUM_LAYERS,
    cache,
    head_segments,
    layers_in_block,
    one_storage,
    plane,
    storage_per_layer,
    two_planes,
)


def pieces_of(layout: CacheLayout) -> GroupPieces:
    storages = [
        MappedStorage(1_000_000 * (index + 1), size)
        for index, size in enumerate(layout.storage_bytes)
    ]
    check_layout(layout, storages)
    return GroupPieces(layout.groups[0], storages)


@pytest.mark.parametrize("name", LAYOUTS)
def test_spans_cover_the_object_in_order_and_without_gaps(name: str) -> None:
    pieces = pieces_of(LAYOUTS[name]())
    for first in range(NUM_LAYERS):
        for end in range(first + 1, NUM_LAYERS + 1):
            span = pieces.span(first, end)
            at = span.offset
            for piece in span.pieces:
                assert piece.offset == at
                at += piece.length
            assert at == span.offset + span.num_bytes
            assert span.sizes == tuple(piece.length for piece in span.pieces)
            assert span.offsets == tuple(piece.offset for piece in span.pieces)
    whole = pieces.span(0, NUM_LAYERS)
    assert (whole.offset, whole.num_bytes) == (0, pieces.object_bytes)


def test_addresses_are_those_of_the_layout() -> None:
    span = pieces_of(two_planes()).span(1, 2)
    assert span.addresses(3) == [
        1_000_000 + 64 + 2048 + 3 * 112,
        2_000_000 + 8 + 1024 + 3 * 80 + 8,
    ]
    assert span.offset == 136
    assert span.sizes == (96, 40)
    assert span.offsets == (136, 232)


def test_layers_side_by_side_are_one_piece() -> None:
    pieces = pieces_of(layers_in_block())
    assert len(pieces.span(0, NUM_LAYERS).pieces) == 1
    assert len(pieces.span(1, 3).pieces) == 1


def test_layers_apart_and_heads_apart_stay_apart() -> None:
    assert len(pieces_of(one_storage()).span(0, NUM_LAYERS).pieces) == NUM_LAYERS
    assert len(pieces_of(head_segments()).span(2, 3).pieces) == 3


def test_neighbours_with_different_strides_stay_apart() -> None:
    # Side by side in block 0 only.
    layout = cache([[plane(0, 0, 96, ((0, 32),)), plane(0, 32, 64, ((0, 32),))]], (1000,))
    assert len(pieces_of(layout).span(0, 1).pieces) == 2


@pytest.mark.parametrize(
    ("layers", "blocks", "inside"),
    [
        ((0, NUM_LAYERS), [0, NUM_BLOCKS - 1], True),
        ((0, 1), [], True),
        ((0, NUM_LAYERS + 1), [1], False),
        ((-1, 1), [1], False),
        ((2, 2), [1], False),
        ((0, 1), [NUM_BLOCKS], False),
        ((0, 1), [-1], False),
    ],
)
def test_layers_and_blocks_outside_are_noticed(
    layers: tuple[int, int], blocks: list[int], inside: bool
) -> None:
    assert pieces_of(one_storage()).holds(*layers, blocks) is inside


def broken(reason: str) -> CacheLayout:
    good = one_storage()
    end = NUM_BLOCKS * 96
    planes = {
        "ends at byte 673": plane(0, 1, 96),
        "names storage 1 of 1": plane(1, 0, 96),
        "negative offset": plane(0, -1, 96),
        "offset or stride": plane(0, 0, 0),
        "negative segment": plane(0, 0, 96, ((-1, 5),)),
        "empty or": plane(0, 0, 96, ((0, 10), (20, 0))),
        "ends at byte 674": plane(0, 0, 96, ((50, 48), (0, 10))),
    }
    if reason in planes:
        return cache([[planes[reason]]], (end,))
    if reason == "no planes":
        return cache([[plane(0, 0, 96)], []], (end,))
    if reason == "speaks of 2 storages":
        return msgspec.structs.replace(good, storage_bytes=(*good.storage_bytes, 1))
    if reason == "no blocks":
        group = msgspec.structs.replace(good.groups[0], num_blocks=0)
    else:
        group = GroupLayout(group=0, block_size=16, num_blocks=3, layers=())
    return msgspec.structs.replace(good, groups=(group,))


@pytest.mark.parametrize(
    "reason",
    [
        "ends at byte 673",
        "ends at byte 674",
        "names storage 1 of 1",
        "negative offset",
        "offset or stride",
        "negative segment",
        "empty or",
        "no planes",
        "speaks of 2 storages",
        "no blocks",
        "no bytes",
    ],
)
def test_a_layout_that_leaves_its_storages_is_refused(reason: str) -> None:
    layout = broken(reason)
    with pytest.raises(HandleError, match="no blocks or no" if reason == "no bytes" else reason):
        check_layout(layout, [MappedStorage(4096, layout.storage_bytes[0])])


def test_a_storage_of_another_size_is_refused() -> None:
    layout = one_storage()
    with pytest.raises(HandleError, match="the layout says"):
        check_layout(layout, [MappedStorage(4096, layout.storage_bytes[0] + 1)])


def test_whole_objects_side_by_side_are_copied_in_one_go() -> None:
    pieces = pieces_of(layers_in_block())
    size = pieces.object_bytes
    base = pieces.span(0, NUM_LAYERS).pieces[0].address
    hosts = [10_000, 10_000 + size, 10_000 + 2 * size, 90_000]
    found = list(copies(pieces, range(NUM_LAYERS), [2, 3, 4, 5], hosts))
    assert found == [(base + 2 * size, 10_000, 3 * size), (base + 5 * size, 90_000, size)]
    # Neighbours on one side only.
    scattered = list(copies(pieces, range(NUM_LAYERS), [4, 3], hosts[:2]))
    assert [length for _, _, length in scattered] == [size, size]
    assert list(copies(pieces, range(NUM_LAYERS), [], [])) == []


def test_part_of_an_object_is_never_merged_with_its_neighbour() -> None:
    pieces = pieces_of(layers_in_block())
    found = list(copies(pieces, range(1), [2, 3], [10_000, 10_096]))
    assert [length for _, _, length in found] == [96, 96]


def test_a_layer_of_blocks_side_by_side_is_merged_where_its_objects_are_packed() -> None:
    pieces = pieces_of(one_storage())
    base = pieces.span(1, 2).pieces[0].address
    # Hosts count from the start of the whole object: layer 1 begins at 96.
    hosts = [10_000 - 96, 10_000, 10_096, 50_000]
    found = list(copies(pieces, range(1, 2), [2, 3, 4, 6], hosts))
    assert found == [(base + 2 * 96, 10_000, 3 * 96), (base + 6 * 96, 50_096, 96)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("layers", [range(NUM_LAYERS), range(1, 3)])
def test_packed_memory_is_where_the_store_looks_for_it(name: str, layers: range) -> None:
    """Copies into packed memory and what a store reads from there name the same bytes."""
    pieces = pieces_of(LAYOUTS[name]())
    span = pieces.span(layers.start, layers.stop)
    packed = Packed(50_000_000, 4, [5, 1, 2, 3], [0, 1, 2, 3])
    # Address in staging memory → address in the cache, byte by byte.
    held = {
        host + at: memory + at
        for memory, host, length in packed_copies(pieces, layers, packed)
        for at in range(length)
    }
    assert len(held) == 4 * span.num_bytes
    assert set(held) == set(range(50_000_000, 50_000_000 + 4 * span.num_bytes))
    for block, slot in zip(packed.block_ids, packed.slots, strict=True):
        one = packed_range("k", span, packed, slot)
        object_order = [
            held[address + at]
            for address, size in zip(one.addresses, one.sizes, strict=True)
            for at in range(size)
        ]
        want = [
            address + at
            for address, size in zip(span.addresses(block), span.sizes, strict=True)
            for at in range(size)
        ]
        assert object_order == want
        assert one.offsets[0] == span.offset
        assert sum(one.sizes) == span.num_bytes


def test_runs_of_blocks_are_one_copy_for_each_plane() -> None:
    pieces = pieces_of(storage_per_layer())
    packed = Packed(50_000_000, 4, [2, 3, 4, 6], range(4))
    found = list(packed_copies(pieces, range(2), packed))
    assert [length for _, _, length in found] == [3 * 96, 96, 3 * 96, 96]
    strided = pieces_of(two_planes())
    found = list(packed_copies(strided, range(1), packed))
    assert [length for _, _, length in found] == [96] * 4 + [40] * 4
