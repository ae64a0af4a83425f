import ctypes
import mmap
import types
from typing import Any

import pytest

from kvworker.stores import mooncake_segment
from kvworker.stores.base import LocalObject
from kvworker.stores.mooncake_segment import OwnSegment, Warmer, object_size

SEGMENT = OwnSegment("here:1", base=1000, start=1000, end=2000)


def _replica(address: int, size: int, endpoint: str = "here:1", *, memory: bool = True) -> Any:
    buffer = types.SimpleNamespace(buffer_address=address, size=size, transport_endpoint=endpoint)
    return types.SimpleNamespace(
        is_memory_replica=lambda: memory,
        get_memory_descriptor=lambda: types.SimpleNamespace(buffer_descriptor=buffer),
    )


@pytest.mark.parametrize(
    ("replicas", "found"),
    [
        ([_replica(1000, 1000)], LocalObject(1000, 1000)),
        ([_replica(1000, 10, "there:1"), _replica(1500, 10)], LocalObject(1500, 10)),
        ([_replica(1000, 10, memory=False)], None),
        ([_replica(1000, 10, "there:1")], None),
        ([_replica(999, 10)], None),
        ([_replica(1995, 10)], None),
        ([], None),
        (None, None),
    ],
)
def test_only_what_surely_lies_here_is_local(replicas: Any, found: LocalObject | None) -> None:
    assert SEGMENT.locate(replicas) == found


def test_the_size_is_that_of_a_replica_in_memory() -> None:
    assert object_size([_replica(1, 7, memory=False), _replica(1, 10, "there:1")]) == 10
    assert object_size([_replica(1, 7, memory=False)]) == 0
    assert object_size(None) == 0


def _mapping(size: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_an_address_is_looked_up_and_read_without_risk() -> None:
    memory, address = _mapping(mmap.PAGESIZE)
    memory[:5] = b"bytes"
    span = mooncake_segment._mapping_around(address)
    assert span is not None
    assert span[0] <= address < span[1]
    assert mooncake_segment._peek(address).startswith(b"bytes")
    assert mooncake_segment._mapping_around(4096) is None
    assert mooncake_segment._peek(4096) == b""


def _resident_pages(address: int, size: int) -> int:
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(address, size, pages) == 0
    return sum(page & 1 for page in pages)


def test_warming_makes_memory_present_and_keeps_its_bytes() -> None:
    size = 8 << 20
    memory, address = _mapping(size + (2 << 20))
    base = -(-address // (2 << 20)) * (2 << 20)
    at = base - address
    memory[at : at + 3] = b"abc"
    assert _resident_pages(base + (4 << 20), 2 << 20) == 0
    warmer = Warmer(OwnSegment("here:1", base, address, address + size + (2 << 20)), size)
    warmer.start()
    warmer._thread.join()
    warmer.stop()
    assert _resident_pages(base, size) == size // mmap.PAGESIZE
    assert memory[at : at + 3] == b"abc"


def test_memory_that_the_host_cannot_spare_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_segment, "_available_bytes", lambda: 1 << 20)
    memory, address = _mapping(6 << 20)
    base = -(-address // (2 << 20)) * (2 << 20)
    warmer = Warmer(OwnSegment("here:1", base, address, address + (6 << 20)), 4 << 20)
    warmer.start()
    warmer.stop()
    assert len(memory) == 6 << 20
    assert _resident_pages(base, 4 << 20) == 0
