"""CPU memory: share torch storages with another process, and map what was shared.

The exporting half runs in the model process and needs torch (imported by its callers; only its
types are named here). The mapping half runs in the daemon and needs none.

A torch CPU storage is private memory. ``export_storages`` *re-homes* it: torch allocates an
unlinked POSIX shared memory file, copies the bytes and swaps the pointer inside the storage, so
that every view of it moves along. Nothing is left in ``/dev/shm`` by name, so nothing can leak
when a process is killed: the kernel frees the pages with the last mapping or descriptor.

Threading: exports are made by one thread; a ``Mapped`` may be used by any thread until ``close``.
"""

import ctypes
import mmap
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcommon.errors import HandleError
from kvcommon.memory.handles import FileHandle, LocalHandle, StorageHandle

if TYPE_CHECKING:
    import torch

#: Where torch's shared memory files live.
SHM_DIR = Path("/dev/shm")  # noqa: S108  (not a temporary file of ours: the file system is asked)
_GIB = 1 << 30

#: Descriptors that keep exported files reachable through ``/proc``, by (device, inode). torch
#: closes its own when the storage dies, and the number could then name another file.
_exported: dict[tuple[int, int], int] = {}


class Mapped:
    """Memory of a handle in this process's address space."""

    def __init__(self, address: int, size: int, mapping: mmap.mmap | None = None) -> None:
        """``mapping`` is what must be closed; None: the memory belongs to somebody else."""
        self.address = address
        self.size = size
        self._mapping = mapping

    def close(self) -> None:
        """Unmap. The caller has made sure that nothing uses the address any more. Idempotent."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()


def export_storages(storages: Sequence["torch.UntypedStorage"]) -> tuple[FileHandle, ...]:
    """Make CPU storages mappable by another process of this user. Re-homes them in place.

    Costs about a second per GiB and, while it runs, twice the memory of the storage at hand.
    Exporting a storage again gives an equal handle. The files stay open until
    ``release_storages`` or the end of the process.

    Args:
        storages: Distinct CPU storages.

    Returns:
        One handle per storage, in order.

    Raises:
        HandleError: ``/dev/shm`` is too small, or torch cannot share a storage. Storages before
            the one at fault have been re-homed, which changes nothing for their users.
    """
    for index, storage in enumerate(storages):
        if storage.device.type != "cpu" or storage.nbytes() == 0:
            cause = f"storage {index} ({storage.nbytes()} bytes on {storage.device}) is not CPU"
            raise HandleError(f"{cause} memory that can be shared")
    # Private pages are promised, not reserved: without this check a file system that is too small
    # kills the process with SIGBUS at the first touch.
    check_room(sum(s.nbytes() for s in storages if not s.is_shared()), free_bytes(SHM_DIR))
    return tuple(_export(storage) for storage in storages)


def free_bytes(directory: Path) -> int:
    """Bytes that can still be allocated in the file system of ``directory``."""
    try:
        info = os.statvfs(directory)
    except OSError as error:
        remedy = "mount a tmpfs there; sharing CPU memory between processes needs it"
        raise HandleError(f"{directory}: {error.strerror}", remedy) from error
    return info.f_bavail * info.f_frsize


def check_room(need_bytes: int, have_bytes: int) -> None:
    """Raise ``HandleError`` if shared memory of ``need_bytes`` does not fit in ``have_bytes``."""
    if need_bytes <= have_bytes:
        return
    gib = -(-(need_bytes + _GIB // 2) // _GIB)
    cause = (
        f"sharing the KV cache needs {need_bytes} bytes ({need_bytes / _GIB:.2f} GiB) of {SHM_DIR},"
        f" and {have_bytes} bytes ({have_bytes / _GIB:.2f} GiB) are free"
    )
    remedy = (
        f"give it more: docker run --shm-size={gib}g (or --ipc=host); Kubernetes: an emptyDir of"
        f" medium Memory at {SHM_DIR}; plain host: mount -o remount,size={gib}G {SHM_DIR};"
        " or give vLLM a smaller KV cache (VLLM_CPU_KVCACHE_SPACE)"
    )
    raise HandleError(cause, remedy)


def _export(storage: "torch.UntypedStorage") -> FileHandle:
    try:
        shared_fd, size = storage._share_fd_cpu_()
    except RuntimeError as error:
        remedy = "use torch's sharing strategy file_descriptor, which is its default on Linux"
        raise HandleError(f"torch cannot share a CPU storage: {error}", remedy) from error
    info = os.fstat(shared_fd)
    identity = (info.st_dev, info.st_ino)
    if identity not in _exported:
        _exported[identity] = os.dup(shared_fd)
    return _file_handle(_exported[identity], size)


def _file_handle(fd: int, size: int) -> FileHandle:
    info = os.fstat(fd)
    return FileHandle(pid=os.getpid(), fd=fd, size=size, st_dev=info.st_dev, st_ino=info.st_ino)


def release_storages(handles: Iterable[FileHandle]) -> None:
    """Close the files behind handles of ``export_storages``: they can be mapped no more.

    Mappings that exist, and the storages themselves, are not affected. Idempotent.
    """
    for handle in handles:
        fd = _exported.pop((handle.st_dev, handle.st_ino), None)
        if fd is not None:
            os.close(fd)


def local_handles(storages: Iterable["torch.UntypedStorage"]) -> tuple[LocalHandle, ...]:
    """Handles for use inside this process. The caller keeps the storages alive."""
    pid = os.getpid()
    return tuple(LocalHandle(address=s.data_ptr(), size=s.nbytes(), pid=pid) for s in storages)


def map_handle(handle: StorageHandle) -> Mapped:
    """Map the memory of a handle, for reading and writing, shared with its exporter.

    The mapping outlives the exporter. All its pages are entered in the page table at once: a
    first touch in the middle of a load would cost more than the copy.

    Raises:
        HandleError: the exporter is gone, the file is not the one that was exported, it is too
            small, or this process may not open it.
    """
    if isinstance(handle, LocalHandle):
        if handle.pid != os.getpid():
            cause = f"a local handle of process {handle.pid} means nothing in {os.getpid()}"
            raise HandleError(cause, "export file handles for a daemon of its own process")
        return Mapped(handle.address, handle.size)
    if not isinstance(handle, FileHandle):
        cause = f"a handle of {type(handle).__name__} means no memory of the CPU"
        raise HandleError(cause, "start the daemon with the engine's device")
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError as error:
        remedy = (
            "the exporter must be alive, run as the same user, and share a PID namespace with"
            " the daemon (docker: --pid=container:<name>)"
        )
        raise HandleError(f"cannot open {path}: {error.strerror}", remedy) from error
    try:
        _check_same_file(fd, handle, path)
        return _map(fd, handle.size, path)
    finally:
        os.close(fd)


def _check_same_file(fd: int, handle: FileHandle, path: str) -> None:
    info = os.fstat(fd)
    if (info.st_dev, info.st_ino) != (handle.st_dev, handle.st_ino):
        cause = f"{path} is another file than the one that was exported"
        raise HandleError(cause, "the exporter closed it meanwhile, or has restarted: attach again")
    if not stat.S_ISREG(info.st_mode) or not 0 < handle.size <= info.st_size:
        raise HandleError(f"{path} has {info.st_size} bytes, the handle says {handle.size}")


def _map(fd: int, size: int, path: str) -> Mapped:
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    try:
        mapping = mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        remedy = "raise the limit on address space (ulimit -v)"
        raise HandleError(f"cannot map {size} bytes of {path}: {error.strerror}", remedy) from error
    # The ctypes object is a buffer export and would keep the mapping from closing: let it go.
    return Mapped(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), size, mapping)
