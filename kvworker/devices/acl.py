"""CANN's runtime (AscendCL) as a driver."""

import ctypes
from ctypes import byref, c_int32, c_size_t, c_uint32, c_void_p

from kvworker.devices.driver import Direction, Driver, Library, event_handle

LIBRARY = "libascendcl.so"
#: ACL_MEM_MALLOC_HUGE_FIRST: pages of 2 MiB, which transfers over HCCS need.
_HUGE_FIRST = 0
#: Neither ACL_STREAM_FAST_LAUNCH nor ACL_STREAM_FAST_SYNC: copies are not many small kernels.
_NO_FLAGS = 0


class AclDriver(Driver):
    """See ``Driver``."""

    def __init__(self) -> None:
        """Load the library. Raises ``DeviceError``."""
        self._library = Library(LIBRARY)

    def bind(self, index: int) -> None:
        """``aclrtSetDevice``."""
        self._library.call("aclrtSetDevice", c_int32(index))

    def new_stream(self) -> int:
        """``aclrtCreateStreamWithConfig``."""
        stream = c_void_p()
        self._library.call(
            "aclrtCreateStreamWithConfig", byref(stream), c_uint32(0), c_uint32(_NO_FLAGS)
        )
        return stream.value or 0

    def free_stream(self, stream: int) -> None:
        """``aclrtDestroyStream``."""
        self._library.call("aclrtDestroyStream", c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        """``aclrtSynchronizeStream``."""
        self._library.call("aclrtSynchronizeStream", c_void_p(stream))

    def copy(self, to: int, source: int, size: int, direction: Direction, stream: int) -> None:
        """``aclrtMemcpyAsync``."""
        self._library.call(
            "aclrtMemcpyAsync",
            c_void_p(to),
            c_size_t(size),
            c_void_p(source),
            c_size_t(size),
            c_int32(direction.value),
            c_void_p(stream),
        )

    def copy_now(self, to: int, source: int, size: int, direction: Direction) -> None:
        """``aclrtMemcpy``."""
        self._library.call(
            "aclrtMemcpy",
            c_void_p(to),
            c_size_t(size),
            c_void_p(source),
            c_size_t(size),
            c_int32(direction.value),
        )

    def open_event(self, handle: bytes) -> int:
        """``aclrtIpcOpenEventHandle``."""
        event = c_void_p()
        self._library.call("aclrtIpcOpenEventHandle", event_handle(handle), byref(event))
        return event.value or 0

    def close_event(self, event: int) -> None:
        """``aclrtDestroyEvent``."""
        self._library.call("aclrtDestroyEvent", c_void_p(event))

    def wait_event(self, stream: int, event: int) -> None:
        """``aclrtStreamWaitEvent``."""
        self._library.call("aclrtStreamWaitEvent", c_void_p(stream), c_void_p(event))

    def allocate(self, size: int) -> int:
        """``aclrtMalloc``."""
        address = c_void_p()
        self._library.call("aclrtMalloc", byref(address), c_size_t(size), c_int32(_HUGE_FIRST))
        return address.value or 0

    def free(self, address: int) -> None:
        """``aclrtFree``."""
        self._library.call("aclrtFree", c_void_p(address))

    def allocate_host(self, size: int) -> int:
        """``aclrtMallocHost``."""
        address = c_void_p()
        self._library.call("aclrtMallocHost", byref(address), c_size_t(size))
        return address.value or 0

    def free_host(self, address: int) -> None:
        """``aclrtFreeHost``."""
        self._library.call("aclrtFreeHost", c_void_p(address))


def device_count() -> int:
    """Devices that this process may use. Raises ``DeviceError``."""
    count = ctypes.c_uint32()
    Library(LIBRARY).call("aclrtGetDeviceCount", byref(count))
    return count.value


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of the bound device. Raises ``DeviceError``."""
    hbm = 1
    free, total = c_size_t(), c_size_t()
    Library(LIBRARY).call("aclrtGetMemInfo", c_int32(hbm), byref(free), byref(total))
    return free.value, total.value
