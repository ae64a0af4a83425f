"""What copies need of a device's driver: threads, streams, events, memory.

The daemon talks to the driver itself, through ctypes, and not through torch: a copy costs one call
that lets go of the interpreter's lock, no kernel is needed, and nothing is queued anywhere but in
the stream that it was given (torch_npu has a queue of its own, which would reorder our calls with
those of torch). Streams, events and addresses are plain integers here.

Errors of every method: ``DeviceError`` with the driver's code.
"""

import ctypes
import enum
from abc import ABC, abstractmethod
from typing import Any

from kvcommon.errors import DeviceError


class Direction(enum.Enum):
    """Between which memories a copy goes; the values are those of both drivers."""

    TO_DEVICE = 1
    FROM_DEVICE = 2
    ON_DEVICE = 3


class Driver(ABC):
    """One driver library. Threads: any that has called ``bind``."""

    @abstractmethod
    def bind(self, index: int) -> None:
        """Give the calling thread a context on the device."""

    @abstractmethod
    def new_stream(self) -> int:
        """Make a stream of the bound device."""

    @abstractmethod
    def free_stream(self, stream: int) -> None:
        """Destroy a stream that has nothing left to do."""

    @abstractmethod
    def synchronize(self, stream: int) -> None:
        """Wait until the stream has done everything."""

    @abstractmethod
    def copy(self, to: int, source: int, size: int, direction: Direction, stream: int) -> None:
        """Queue a copy. Host memory must be pinned, and stay as it is until the copy is done."""

    @abstractmethod
    def copy_now(self, to: int, source: int, size: int, direction: Direction) -> None:
        """Copy from or to any host memory, and wait. Not ordered with any stream."""

    @abstractmethod
    def open_event(self, handle: bytes) -> int:
        """Open an event of another process."""

    @abstractmethod
    def close_event(self, event: int) -> None:
        """Close it; streams that wait for it still do."""

    @abstractmethod
    def wait_event(self, stream: int, event: int) -> None:
        """Let what is queued next on the stream wait for the event's newest record."""

    @abstractmethod
    def allocate(self, size: int) -> int:
        """Allocate device memory, aligned to 2 MiB where ``size`` is a multiple of it."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Free device memory."""

    @abstractmethod
    def allocate_host(self, size: int) -> int:
        """Allocate pinned host memory."""

    @abstractmethod
    def free_host(self, address: int) -> None:
        """Free pinned host memory."""


class EventHandle(ctypes.Structure):
    """An event's handle, which both drivers take by value."""

    _fields_ = (("bytes", ctypes.c_char * 64),)


def event_handle(handle: bytes) -> EventHandle:
    """Make the driver's form of a handle."""
    if len(handle) != ctypes.sizeof(EventHandle):
        raise DeviceError(f"an event's handle has {len(handle)} bytes")
    return EventHandle.from_buffer_copy(handle)


class Library:
    """A C library whose functions return 0 or an error code."""

    def __init__(self, name: str) -> None:
        """Load it. Raises ``DeviceError`` if it is not there."""
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise DeviceError(f"{name} cannot be loaded: {error}") from error

    def call(self, function: str, *args: Any) -> None:  # noqa: ANN401 - ctypes takes anything
        """Call a function.

        Raises:
            DeviceError: the library has no such function, or it did not return 0.
        """
        try:
            found = getattr(self._library, function)
        except AttributeError as error:
            raise DeviceError(f"this driver has no {function}: install a newer one") from error
        code = found(*args)
        if code != 0:
            raise DeviceError(f"{function} failed with code {code}")

    def has(self, function: str) -> bool:
        """Tell whether the library has a function."""
        return hasattr(self._library, function)
