from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvcommon.errors import HandleError
from kvworker.devices.cpu import CpuDevice, CpuMapping, _copies
from tests.kvworker.devices.layouts import NUM_LAYERS, Cache, layers_in_block, one_storage


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = Cache(layers_in_block(), 1)
    yield made
    made.close()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_maps() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kv")


def test_whole_objects_side_by_side_are_copied_in_one_go(cache: Cache) -> None:
    mapping = CpuDevice("cpu:0").map(cache.handles)
    group = cache.layout.groups[0]
    size = group.object_bytes
    base = mapping.storages[0].address
    hosts = [10_000, 10_000 + size, 10_000 + 2 * size, 90_000]
    copies = list(_copies(mapping, group, range(NUM_LAYERS), [2, 3, 4, 5], hosts))
    assert copies == [(base + 2 * size, 10_000, 3 * size), (base + 5 * size, 90_000, size)]
    # Neighbours on one side only.
    scattered = list(_copies(mapping, group, range(NUM_LAYERS), [4, 3], hosts[:2]))
    assert [length for _, _, length in scattered] == [size, size]
    assert list(_copies(mapping, group, range(NUM_LAYERS), [], [])) == []
    mapping.close()


def test_part_of_an_object_is_never_merged_with_its_neighbour(cache: Cache) -> None:
    mapping = CpuDevice("cpu:0").map(cache.handles)
    group = cache.layout.groups[0]
    copies = list(_copies(mapping, group, range(1), [2, 3], [10_000, 10_096]))
    assert [length for _, _, length in copies] == [96, 96]
    mapping.close()


def test_a_refused_handle_leaves_nothing_mapped(cache: Cache) -> None:
    bad = msgspec.structs.replace(cache.handles[0], st_ino=1)
    before = open_fds(), num_maps()
    with pytest.raises(HandleError):
        CpuDevice("cpu:0").map([cache.handles[0], bad])
    assert (open_fds(), num_maps()) == before


def test_pieces_follow_the_layout_they_are_asked_for() -> None:
    cache = Cache(one_storage(), 1)
    mapping = CpuDevice("cpu:0").map(cache.handles)
    assert isinstance(mapping, CpuMapping)
    group = cache.layout.groups[0]
    assert mapping.pieces(group) is mapping.pieces(group)
    other = msgspec.structs.replace(group, num_blocks=2)
    assert mapping.pieces(other).layout is other
    mapping.close()
    cache.close()
