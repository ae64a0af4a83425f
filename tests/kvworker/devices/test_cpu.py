from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvcommon.errors import HandleError
from kvworker.devices.cpu import CpuDevice, CpuMapping
from tests.kvworker.devices.layouts import Cache, layers_in_block, one_storage


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = Cache(layers_in_block(), 1)
    yield made
    made.close()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_maps() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kv")


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
    assert mapping.table.pieces(group) is mapping.table.pieces(group)
    other = msgspec.structs.replace(group, num_blocks=2)
    assert mapping.table.pieces(other).layout is other
    mapping.close()
    cache.close()
