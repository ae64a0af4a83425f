import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from kvcommon.errors import HandleError
from kvcommon.memory.cpu import (
    SHM_DIR,
    check_room,
    export_storages,
    free_bytes,
    local_handles,
    map_handle,
    release_storages,
)
from kvcommon.memory.handles import FileHandle, LocalHandle

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def storage(size: int, device: str = "cpu") -> torch.UntypedStorage:
    """Memory that is not touched."""
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()


def memfd(size: int) -> FileHandle:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    info = os.fstat(fd)
    return FileHandle(pid=os.getpid(), fd=fd, size=size, st_dev=info.st_dev, st_ino=info.st_ino)


def test_an_exported_storage_is_what_tensors_see() -> None:
    before = set(SHM_DIR.iterdir())
    tensor = torch.arange(1000, dtype=torch.int32)
    view = tensor[100:200]
    handles = export_storages([tensor.untyped_storage()])
    mapped = map_handle(handles[0])
    assert mapped.size == 4000
    assert read(mapped.address, 4000) == bytes(tensor.numpy().tobytes())
    # Both ways, through a view that was made before.
    ctypes.memset(mapped.address + 400, 0, 400)
    assert int(view.abs().sum()) == 0
    view.fill_(7)
    assert read(mapped.address + 400, 4) == (7).to_bytes(4, "little")
    mapped.close()
    mapped.close()
    release_storages(handles)
    assert set(SHM_DIR.iterdir()) == before


def test_views_of_one_storage_move_together_and_export_once() -> None:
    base = torch.zeros(64, dtype=torch.uint8)
    first, second = base[:32], base[32:]
    (one,) = export_storages([first.untyped_storage()])
    (again,) = export_storages([second.untyped_storage()])
    assert one == again
    second.fill_(9)
    mapped = map_handle(one)
    assert read(mapped.address, 64) == b"\0" * 32 + b"\x09" * 32
    mapped.close()
    release_storages([one])


def test_a_process_without_torch_maps_reads_and_writes() -> None:
    tensor = torch.full((5000,), 3, dtype=torch.uint8)
    handles = export_storages([tensor.untyped_storage()])
    code = (
        "import ctypes, sys, msgspec\n"
        "from kvcommon.memory.cpu import map_handle\n"
        "from kvcommon.memory.handles import FileHandle\n"
        "mapped = map_handle(msgspec.json.decode(sys.argv[1], type=FileHandle))\n"
        "assert ctypes.string_at(mapped.address, mapped.size) == b'\\x03' * 5000\n"
        "ctypes.memset(mapped.address + 4999, 8, 1)\n"
        "print('written', flush=True)\n"
        "sys.stdin.readline()\n"
        "assert ctypes.string_at(mapped.address, 1) == b'\\x05'\n"
        "assert 'torch' not in sys.modules\n"
        "mapped.close()\n"
    )
    text = msgspec.json.encode(handles[0]).decode()
    with subprocess.Popen(
        [sys.executable, "-c", code, text],
        env=ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        assert tensor[4999] == 8
        tensor[0] = 5
        child.communicate("go\n", timeout=60)
    assert child.returncode == 0
    release_storages(handles)


def test_a_mapping_outlives_a_killed_exporter_and_nothing_is_left() -> None:
    before = set(SHM_DIR.iterdir())
    code = (
        "import sys, msgspec, torch\n"
        "from kvcommon.memory.cpu import export_storages\n"
        "tensor = torch.full((9000,), 4, dtype=torch.uint8)\n"
        "(handle,) = export_storages([tensor.untyped_storage()])\n"
        "print(msgspec.json.encode(handle).decode(), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        handle = msgspec.json.decode(child.stdout.readline(), type=FileHandle)
        mapped = map_handle(handle)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)
    assert read(mapped.address, 9000) == b"\x04" * 9000
    with pytest.raises(HandleError, match="exporter must be alive"):
        map_handle(handle)
    mapped.close()
    assert set(SHM_DIR.iterdir()) == before


def test_another_file_under_the_same_number_is_refused() -> None:
    handle = memfd(4096)
    other = memfd(4096)
    os.dup2(other.fd, handle.fd)
    with pytest.raises(HandleError, match="another file") as raised:
        map_handle(handle)
    assert "attach again" in raised.value.remedy
    os.close(handle.fd)
    os.close(other.fd)


def test_a_file_that_is_too_small_is_refused() -> None:
    handle = memfd(4096)
    with pytest.raises(HandleError, match="the handle says 4097"):
        map_handle(msgspec.structs.replace(handle, size=4097))
    with pytest.raises(HandleError, match="the handle says 0"):
        map_handle(msgspec.structs.replace(handle, size=0))
    os.close(handle.fd)


def test_a_descriptor_that_is_no_file_is_refused() -> None:
    reader, writer = os.pipe()
    info = os.fstat(reader)
    handle = FileHandle(pid=os.getpid(), fd=reader, size=1, st_dev=info.st_dev, st_ino=info.st_ino)
    with pytest.raises(HandleError):
        map_handle(handle)
    os.close(reader)
    os.close(writer)


def test_a_released_export_can_be_mapped_no_more() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    handles = export_storages([tensor.untyped_storage()])
    mapped = map_handle(handles[0])
    release_storages(handles)
    release_storages(handles)
    with pytest.raises(HandleError):
        map_handle(handles[0])
    tensor.fill_(6)
    assert read(mapped.address, 100) == b"\x06" * 100
    mapped.close()


def test_too_little_shared_memory_is_said_before_anything_is_touched() -> None:
    # Promised, never touched: five storages of a quarter of what is free.
    part = free_bytes(SHM_DIR) // 4
    storages = [storage(part) for _ in range(5)]
    with pytest.raises(HandleError) as raised:
        export_storages(storages)
    assert str(5 * part) in raised.value.cause
    assert "--shm-size=" in raised.value.remedy
    assert not any(one.is_shared() for one in storages)


def test_room_that_is_just_enough_is_enough() -> None:
    check_room(100, 100)
    check_room(0, 0)
    with pytest.raises(HandleError, match=r"101 bytes .* 100 bytes"):
        check_room(101, 100)


def test_a_missing_directory_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(HandleError, match="mount a tmpfs"):
        free_bytes(tmp_path / "nothing")


def test_memory_that_is_not_on_the_cpu_is_refused() -> None:
    with pytest.raises(HandleError, match="storage 1"):
        export_storages([storage(8), storage(8, device="meta")])
    with pytest.raises(HandleError, match="storage 0"):
        export_storages([storage(0)])


def test_local_handles_pass_through_in_their_own_process_only() -> None:
    tensor = torch.zeros(16, dtype=torch.uint8)
    (handle,) = local_handles([tensor.untyped_storage()])
    mapped = map_handle(handle)
    assert (mapped.address, mapped.size) == (tensor.data_ptr(), 16)
    mapped.close()
    tensor.fill_(1)
    with pytest.raises(HandleError, match="means nothing"):
        map_handle(LocalHandle(address=handle.address, size=16, pid=os.getpid() + 1))
