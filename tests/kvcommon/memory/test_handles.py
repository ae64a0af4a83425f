import msgspec
import pytest

from kvcommon.memory.handles import FileHandle, LocalHandle, PageHandle, StorageHandle

HANDLES = [
    FileHandle(pid=1, fd=2, size=3, st_dev=4, st_ino=5),
    LocalHandle(address=1 << 47, size=4096, pid=7),
]


@pytest.mark.parametrize("handle", HANDLES)
def test_handles_keep_their_kind_on_the_wire(handle: StorageHandle) -> None:
    page = PageHandle(storage=handle)
    wire = msgspec.msgpack.encode(page)
    assert msgspec.msgpack.decode(wire, type=PageHandle) == page


def test_an_unknown_kind_of_handle_is_refused() -> None:
    wire = msgspec.msgpack.encode({"storage": {"type": "teleport", "size": 1}})
    with pytest.raises(msgspec.ValidationError, match="teleport"):
        msgspec.msgpack.decode(wire, type=PageHandle)
