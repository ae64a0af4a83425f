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


#: How one storage of the KV cache reaches the daemon.
StorageHandle = Union[FileHandle, LocalHandle]


class PageHandle(msgspec.Struct, frozen=True, kw_only=True):
    """The progress page (``kvcommon.memory.page``)."""

    storage: StorageHandle
