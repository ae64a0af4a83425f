"""The engine's half of the device suite, for devices whose memory only another process can import.

``python -m tests.conformance.devices.exporter_main <fd> <device>``: answers commands on a socket.
"""

import ctypes
import socket
import sys
from typing import Any

import msgspec
import torch

from kvcommon.memory.clock import EventClock
from kvcommon.memory.export import family_of, make_exporter
from tests.conformance.devices.memory import receive, send


class Engine:
    """Storages and what shares them."""

    def __init__(self, device: str) -> None:
        self._device = device
        kind, _, index = device.partition(":")
        family = family_of(kind)
        assert family is not None
        self._runtime = family.runtime()
        self._runtime.set_device(int(index))
        self._tensors: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def ready(self) -> bool:
        return True

    def make(self, storages: list[bytes]) -> None:
        self._tensors = [
            torch.empty(len(each), dtype=torch.uint8, device=self._device) for each in storages
        ]
        self._exporter = make_exporter(
            [each.untyped_storage() for each in self._tensors], inline=False
        )
        self._exporter.prepare()
        self._clock = self._exporter.clock(1)
        self.overwrite(storages)

    def handles(self) -> Any:
        return msgspec.to_builtins(self._exporter.handles(), builtin_types=(bytes,))

    def everything(self) -> list[bytes]:
        return [each.cpu().numpy().tobytes() for each in self._tensors]

    def overwrite(self, storages: list[bytes]) -> None:
        for tensor, new in zip(self._tensors, storages, strict=True):
            tensor.copy_(torch.frombuffer(bytearray(new), dtype=torch.uint8))
        self._runtime.synchronize()

    def enqueue(self, storages: list[bytes]) -> None:
        """Write as a kernel does: some time later."""
        self._sources = [
            torch.frombuffer(bytearray(new), dtype=torch.uint8).pin_memory() for new in storages
        ]
        for tensor, source in zip(self._tensors, self._sources, strict=True):
            tensor.copy_(source, non_blocking=True)

    def queue(self, storages: list[bytes]) -> bytes:
        assert self._clock is not None
        self.enqueue(storages)
        return self._clock.settle(self._clock.stamp(), shared=True)

    def queue_early(self, storages: list[bytes]) -> bytes:
        """Wrong: the handle goes out although the record may still be in torch's queue."""
        clock = self._clock
        assert isinstance(clock, EventClock)
        # The ring comes round at once.
        clock._events = clock._events[:1]
        handle = clock.settle(clock.stamp(), shared=True)
        self.hold(streams=0, launches=1)
        self.enqueue(storages)
        clock.stamp()
        return handle

    def queue_stale(self, storages: list[bytes]) -> bytes:
        """Wrong: the event of the step before."""
        assert self._clock is not None
        handle = self._clock.settle(self._clock.stamp(), shared=True)
        self._runtime.synchronize()
        self.hold(streams=1, launches=0)
        self.enqueue(storages)
        self._clock.stamp()
        return handle

    def hold(self, streams: int, launches: int) -> None:
        """Hold this process's device back (CANN's stand-in only), or let it go with zeros."""
        ctypes.CDLL("libascendcl.so").cann_double_hold(streams, launches)

    def free_bytes(self) -> int:
        """Device memory that is left."""
        free: int = self._runtime.mem_get_info()[0]
        return free

    def proof(self) -> Any:
        return msgspec.to_builtins(self._exporter.proof(), builtin_types=(bytes,))

    def proven(self) -> bool:
        return self._exporter.proven()

    def drop(self) -> None:
        self._runtime.synchronize()
        self._tensors.clear()
        self._sources.clear()
        del self._exporter, self._clock
        self._runtime.ipc_collect()
        self._runtime.empty_cache()


def main(fd: int, device: str) -> None:
    """Answer until the other end closes."""
    link = socket.socket(fileno=fd)
    engine = Engine(device)
    while True:
        try:
            command, args = receive(link)
        except EOFError:
            return
        send(link, getattr(engine, command)(*args))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
