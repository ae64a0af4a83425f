"""What is checked of a handle before it goes into a driver."""

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from kvcommon.errors import HandleError
from kvcommon.memory import torch_ipc
from kvcommon.memory.handles import CudaHandle, FileHandle, NpuHandle
from kvcommon.memory.npu import FAMILY
from kvcommon.memory.torch_ipc import Identity, check_handle, remove_dead_counters

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


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch_ipc, "SHM", tmp_path)
    return tmp_path


def counters_of(shm: Path, pid: int, named: int) -> tuple[Path, NpuHandle]:
    path = shm / f"torch_{named}_34_0"
    path.touch()
    counter = f"/{path.name}".encode()
    return path, msgspec.structs.replace(GOOD, pid=pid, counter=counter)


def test_only_the_counters_of_a_dead_exporter_are_removed(shm: Path) -> None:
    mine, alive = counters_of(shm, os.getpid(), os.getpid())
    with subprocess.Popen(["true"]) as ended:
        # Before anybody has waited for it.
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        path, dead = counters_of(shm, ended.pid, ended.pid)
        remove_dead_counters([alive, dead])
        assert not path.exists()
    path.touch()
    remove_dead_counters([dead])
    assert not path.exists()
    assert mine.exists()


def test_nobody_has_the_counters_of_others_removed(shm: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    path, liar = counters_of(shm, ended.pid, os.getpid())
    remove_dead_counters([liar])
    assert path.exists()
