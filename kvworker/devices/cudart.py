"""The CUDA runtime as a driver. torch has loaded the library; it is found by its name."""

import ctypes
from ctypes import byref, c_int32, c_size_t, c_uint32, c_void_p

from kvcommon.errors import DeviceError
from kvworker.devices.driver import Direction, Driver, Library, event_handle

#: Newest first: torch brings the one that it was built with.
LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
#: cudaStreamNonBlocking: not ordered with the default stream.
_NON_BLOCKING = 1
_HUGE = 2 << 20


class CudaDriver(Driver):
    """See ``Driver``."""

    def __init__(self) -> None:
        """Find the library. Raises ``DeviceError``."""
        self._library = _load()
        self._bases: dict[int, int] = {}

    def bind(self, index: int) -> None:
        """``cudaSetDevice``."""
        self._library.call("cudaSetDevice", c_int32(index))

    def new_stream(self) -> int:
        """``cudaStreamCreateWithFlags``."""
        stream = c_void_p()
        self._library.call("cudaStreamCreateWithFlags", byref(stream), c_uint32(_NON_BLOCKING))
        return stream.value or 0

    def free_stream(self, stream: int) -> None:
        """``cudaStreamDestroy``."""
        self._library.call("cudaStreamDestroy", c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        """``cudaStreamSynchronize``."""
        self._library.call("cudaStreamSynchronize", c_void_p(stream))

    def copy(self, to: int, source: int, size: int, direction: Direction, stream: int) -> None:
        """``cudaMemcpyAsync``."""
        self._library.call(
            "cudaMemcpyAsync",
            c_void_p(to),
            c_void_p(source),
            c_size_t(size),
            c_int32(direction.value),
            c_void_p(stream),
        )

    def copy_now(self, to: int, source: int, size: int, direction: Direction) -> None:
        """``cudaMemcpy``, which returns early for small copies to the device: wait for those."""
        self._library.call(
            "cudaMemcpy",
            c_void_p(to),
            c_void_p(source),
            c_size_t(size),
            c_int32(direction.value),
        )
        self._library.call("cudaStreamSynchronize", c_void_p(0))

    def open_event(self, handle: bytes) -> int:
        """``cudaIpcOpenEventHandle``."""
        event = c_void_p()
        self._library.call("cudaIpcOpenEventHandle", byref(event), event_handle(handle))
        return event.value or 0

    def close_event(self, event: int) -> None:
        """``cudaEventDestroy``."""
        self._library.call("cudaEventDestroy", c_void_p(event))

    def wait_event(self, stream: int, event: int) -> None:
        """``cudaStreamWaitEvent``."""
        self._library.call("cudaStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint32(0))

    def allocate(self, size: int) -> int:
        """``cudaMalloc``, and as much more as the alignment may need."""
        base = c_void_p()
        self._library.call("cudaMalloc", byref(base), c_size_t(size + _HUGE))
        start = base.value or 0
        address = -(-start // _HUGE) * _HUGE
        self._bases[address] = start
        return address

    def free(self, address: int) -> None:
        """``cudaFree``."""
        self._library.call("cudaFree", c_void_p(self._bases.pop(address)))

    def allocate_host(self, size: int) -> int:
        """``cudaMallocHost``."""
        address = c_void_p()
        self._library.call("cudaMallocHost", byref(address), c_size_t(size))
        return address.value or 0

    def free_host(self, address: int) -> None:
        """``cudaFreeHost``."""
        self._library.call("cudaFreeHost", c_void_p(address))


def _load() -> Library:
    for name in LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return Library(name)
    raise DeviceError(f"none of {', '.join(LIBRARIES)} can be loaded")
