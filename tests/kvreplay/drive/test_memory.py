"""Synthetic KV memory: bytes where the layout says, and nothing beyond."""

import ctypes

import msgspec
import pytest

from kvcommon.layout import CacheLayout
from kvcommon.memory.cpu import map_handle
from kvreplay.drive.errors import DriveError
from kvreplay.drive.memory import MAX_BYTES, KVMemory
from tests.support.fakemodel import FakeModel


def layout() -> CacheLayout:
    model = FakeModel()
    try:
        return model.layout
    finally:
        model.close()


def test_what_is_written_is_right_and_nothing_else() -> None:
    with KVMemory(layout(), 0) as memory:
        memory.spoil(0, 5)
        assert memory.is_spoilt(0, 5)
        for layer in range(3):
            memory.write(0, 5, layer, "key")
        assert [memory.is_right(0, 5, layer, "key") for layer in range(3)] == [True] * 3
        assert not memory.is_spoilt(0, 5)
        assert not memory.is_right(0, 5, 0, "other")
        assert not memory.is_right(0, 6, 0, "key")
        assert (memory.num_layers(0), memory.num_blocks(0), memory.num_layers(1)) == (3, 16, 0)


def test_a_daemon_sees_the_same_bytes() -> None:
    with KVMemory(layout(), 0) as memory:
        (handle,) = memory.handles()
        mapped = map_handle(handle)
        before = ctypes.string_at(mapped.address + 512, 512)
        memory.write(0, 1, 0, "key")
        after = ctypes.string_at(mapped.address + 512, 512)
        mapped.close()
    assert before == bytes(512)
    assert after != before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", -1),
        ("offset", 1 << 40),
        ("block_stride", 1 << 40),
        ("storage", 1),
        ("storage", -1),
        ("segments", ((0, -5),)),
        ("segments", ((-8, 4),)),
    ],
)
def test_a_layout_that_leaves_its_storage_is_refused(field: str, value: object) -> None:
    whole = layout()
    group = whole.groups[0]
    layer = group.layers[1]
    plane = msgspec.structs.replace(layer.planes[0], **{field: value})
    layer = msgspec.structs.replace(layer, planes=(plane,))
    group = msgspec.structs.replace(group, layers=(layer,))
    with pytest.raises(DriveError, match="leaves its storage"):
        KVMemory(msgspec.structs.replace(whole, groups=(group,)), 0)


@pytest.mark.parametrize("size", [0, MAX_BYTES + 1])
def test_sizes_are_bounded(size: int) -> None:
    with pytest.raises(DriveError, match="bytes"):
        KVMemory(msgspec.structs.replace(layout(), storage_bytes=(size,)), 0)
