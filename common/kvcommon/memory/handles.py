"""Handles: plain data with which another process maps memory of this one.

No torch here. The exporting and importing halves are in ``cpu.py`` (and, per device, its
siblings); nothing in a handle is executed by the receiver.
"""

from typing import Union

import msgspec


class FileHandle(msgspec.Struct, frozen=True, kw_only=True, tag="file"):
    """Memory behind an open file of the exporter (a memfd or an unlinked POSIX shm segment).

    The importer opens ``/proc/<pid>/fd/<fd>`` (same user) and maps ``size`` bytes from 0. Device
    and inode number say whether it is still the same file.
    """

    pid: int
    fd: int
    size: int
    st_dev: int
    st_ino: int


class LocalHandle(msgspec.Struct, frozen=True, kw_only=True, tag="local"):
    """Memory of the very same process (inline mode)."""

    address: int
    size: int
    #: The process in which ``address`` means something; any other refuses the handle.
    pid: int = 0


class IpcHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory as torch shares it between processes (``_share_npu_``, ``_share_cuda_``).

    Valid for one import: a second one would upset torch's reference count for ever. The exporter
    therefore makes a new handle for each attach.
    """

    #: Which card: its physical id, whatever either process numbers it.
    physical_id: int
    #: Which card, if the driver knows; empty if it does not (then nothing is compared).
    uuid: bytes = b""
    #: The exporter.
    pid: int
    #: Bytes of the storage.
    size: int
    #: Key of the allocation that the storage lies in; opaque.
    handle: bytes
    #: Where in the allocation, bytes.
    offset: int
    #: Name of the shared memory with torch's reference counters, and the counter's number.
    counter: bytes
    counter_slot: int
    #: Event that the importer waits for first, if ``event_required``.
    event: bytes = b""
    event_required: bool = False


class NpuHandle(IpcHandle, frozen=True, kw_only=True, tag="npu"):
    """Memory of an Ascend NPU."""


class CudaHandle(IpcHandle, frozen=True, kw_only=True, tag="cuda"):
    """Memory of a CUDA device."""


#: Memory of an accelerator.
DeviceHandle = Union[NpuHandle, CudaHandle]
#: How one storage of the KV cache reaches the daemon.
StorageHandle = Union[FileHandle, LocalHandle, NpuHandle, CudaHandle]


class MemoryProof(msgspec.Struct, frozen=True, kw_only=True):
    """Scratch memory that shows, both ways, that the daemon sees this very device memory.

    It holds ``proof.question(nonce)`` once ``event`` has been reached; the daemon replaces that by
    ``proof.answer(nonce)`` before it says ``Attached``.
    """

    storage: StorageHandle
    nonce: int
    #: An event between processes; empty: the memory is ready now.
    event: bytes = b""


class PageHandle(msgspec.Struct, frozen=True, kw_only=True):
    """The progress page (``kvcommon.memory.page``)."""

    storage: StorageHandle
