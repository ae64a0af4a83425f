"""What is checked of a handle before it goes into a driver."""

import msgspec
import pytest

from kvcommon.errors import HandleError
from kvcommon.memory.handles import CudaHandle, FileHandle, NpuHandle
from kvcommon.memory.npu import FAMILY
from kvcommon.memory.torch_ipc import Identity, check_handle

CARD = Identity(3, b"uuid")
GOOD = NpuHandle(
    physical_id=3,
    uuid=b"uuid",
    pid=1,
    size=4096,
    handle=b"\x01c" + bytes(65),
    offset=0,
    counter=b"/torch_12_34_0",
    counter_slot=0,
    event=bytes(64),
)


def test_a_good_handle_is_taken() -> None:
    assert check_handle(FAMILY, GOOD, CARD) is GOOD


@pytest.mark.parametrize(
    "fault",
    [
        {"handle": b"\x01e" + bytes(24)},
        {"handle": b"x"},
        {"size": 0},
        {"size": 1 << 50},
        {"offset": -1},
        {"counter": b"/../../etc/passwd"},
        {"counter": b"/torch_12_34_0/x"},
        {"counter_slot": -1},
        {"event": b""},
    ],
)
def test_a_handle_that_makes_no_sense_is_refused(fault: dict[str, object]) -> None:
    with pytest.raises(HandleError):
        check_handle(FAMILY, msgspec.structs.replace(GOOD, **fault), CARD)


@pytest.mark.parametrize("fault", [{"physical_id": 4}, {"uuid": b"other"}])
def test_memory_of_another_card_is_refused_and_both_are_named(fault: dict[str, object]) -> None:
    with pytest.raises(HandleError, match=r"on card .* serves card 3"):
        check_handle(FAMILY, msgspec.structs.replace(GOOD, **fault), CARD)


@pytest.mark.parametrize(("theirs", "ours"), [(b"", b"uuid"), (b"uuid", b"")])
def test_an_unknown_uuid_is_not_compared(theirs: bytes, ours: bytes) -> None:
    handle = msgspec.structs.replace(GOOD, uuid=theirs)
    assert check_handle(FAMILY, handle, Identity(3, ours)) is handle


def test_memory_of_another_kind_is_refused() -> None:
    cuda = CudaHandle(**msgspec.structs.asdict(GOOD))
    file = FileHandle(pid=1, fd=3, size=1, st_dev=1, st_ino=1)
    for handle in (cuda, file):
        with pytest.raises(HandleError, match="daemon for npu"):
            check_handle(FAMILY, handle, CARD)
