"""This client's own segment: how to recognise objects in it, and getting its memory ready.

An object whose replica lies in our own segment can be read by ``memmove``, ten times faster than
through the library's loopback connection. A replica is named by the endpoint of a transfer engine,
which is not the host name that the client goes by, so it is learnt from a small object that we ask
the master to put into our segment, and proved by finding the object's bytes at that address.
"""

import ctypes
import logging
import mmap
import os
import pathlib
import secrets
import threading
from typing import Any

from kvworker.stores.base import LocalObject
from kvworker.stores.mooncake_client import MooncakeClient

_logger = logging.getLogger("kvferry.worker")

_COOKIE_BYTES = 64
#: ``madvise`` values of Linux that Python's mmap module does not name.
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
#: Populated at once; between two of these ``stop`` is heard.
_CHUNK = 64 << 20
_HUGE_PAGE = 2 << 20


class OwnSegment:
    """Where our segment lies and what its replicas are called."""

    def __init__(self, endpoint: str, base: int, start: int, end: int) -> None:
        self.endpoint = endpoint
        #: Where the first object lies: the segment begins here, or a little before.
        self.base = base
        #: The mapping that holds the segment. It may hold other memory of this process too.
        self.start = start
        self.end = end

    def locate(self, replicas: Any) -> LocalObject | None:  # noqa: ANN401 - the library's objects
        """Where an object lies in our segment, given its replica descriptors."""
        for replica in replicas or ():
            if not replica.is_memory_replica():
                continue
            buffer = replica.get_memory_descriptor().buffer_descriptor
            address, size = int(buffer.buffer_address), int(buffer.size)
            if (
                buffer.transport_endpoint == self.endpoint
                and self.start <= address
                and address + size <= self.end
            ):
                return LocalObject(address, size)
        return None


def object_size(replicas: Any) -> int:  # noqa: ANN401 - the library's objects
    """How large an object is, given its replica descriptors; 0 if none in memory tells."""
    for replica in replicas or ():
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return 0


def learn_segment(client: MooncakeClient, config: Any) -> OwnSegment | None:  # noqa: ANN401
    """Find our own segment by means of a probe object.

    Args:
        client: Set up with a segment.
        config: ``ReplicateConfig`` that prefers our own segment.

    Returns:
        None if the probe could not be stored, or landed elsewhere (our segment is full).
    """
    key = f"kvf1-probe-{secrets.token_hex(8)}"
    cookie = secrets.token_bytes(_COOKIE_BYTES)
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:_COOKIE_BYTES] = cookie
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if client.call("register_buffer", address, mmap.PAGESIZE) != 0:
        return None
    try:
        buffers = ([[address]], [[_COOKIE_BYTES]])
        if client.codes("batch_put_from_multi_buffers", [key], *buffers, config) != [0]:
            return None
        replicas = client.call("get_replica_desc", key)
    finally:
        client.call("unregister_buffer", address)
    segment = None
    for replica in replicas or ():
        if replica.is_memory_replica():
            buffer = replica.get_memory_descriptor().buffer_descriptor
            base = int(buffer.buffer_address)
            span = _mapping_around(base)
            if span is not None and _peek(base) == cookie:
                segment = OwnSegment(str(buffer.transport_endpoint), base, *span)
    client.call("remove", key, True)
    return segment


def _mapping_around(address: int) -> tuple[int, int] | None:
    """The writable mapping of this process that holds this address."""
    for line in pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, mode = line.split(maxsplit=2)[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return (start, end) if mode.startswith("rw") else None
    return None


def _peek(address: int) -> bytes:
    """Read our own memory without the risk of a fault."""
    handle = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        return os.pread(handle, _COOKIE_BYTES, address)
    except OSError:
        return b""
    finally:
        os.close(handle)


class Warmer:
    """Makes a segment's memory present, in huge pages, in a thread of low priority.

    The first write to a fresh page costs several times what copying to it costs, and a save would
    pay that. Memory that the host does not have to spare is left alone.
    """

    def __init__(self, segment: OwnSegment, size: int) -> None:
        self._start = -(-segment.base // _HUGE_PAGE) * _HUGE_PAGE
        self._end = min(segment.end, segment.base + size) // _HUGE_PAGE * _HUGE_PAGE
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncake-warm", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait until the memory is let alone. The segment may be unmapped then."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        advise = ctypes.CDLL(None, use_errno=True).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        size = self._end - self._start
        if size <= 0 or _available_bytes() < 2 * size:
            return
        advise(self._start, size, _MADV_HUGEPAGE)  # no huge pages here: ordinary ones will do
        at = self._start
        while at < self._end and not self._stop.is_set():
            if advise(at, min(_CHUNK, self._end - at), _MADV_POPULATE_WRITE) != 0:
                _logger.debug("segment not populated: errno %d", ctypes.get_errno())
                return
            at += _CHUNK


def _available_bytes() -> int:
    for line in pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
