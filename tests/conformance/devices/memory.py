"""KV memory of an engine, as the device suite needs it: on the CPU, or in a process of its own."""

import importlib.util
import os
import random
import socket
import struct
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvcommon.layout import CacheLayout
from kvcommon.memory.handles import MemoryProof, StorageHandle
from tests.kvworker.devices.layouts import NUM_LAYERS, Cache, block_in

ROOT = Path(__file__).resolve().parents[3]
#: Such a process has to load torch and its device.
START_S = 90.0


def kinds() -> list[str]:
    """Kinds of devices that can be tried in this environment."""
    found = ["cpu"]
    if importlib.util.find_spec("torch_npu") is not None:
        found.append("npu")
    elif importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            found.append("cuda")
    return found


def contents(layout: CacheLayout, seed: int) -> list[bytes]:
    """Random bytes for every storage."""
    dice = random.Random(seed)
    return [dice.randbytes(size) for size in layout.storage_bytes]


class KvMemory(ABC):
    """Storages of one engine, filled with random bytes."""

    layout: CacheLayout

    @abstractmethod
    def handles(self) -> tuple[StorageHandle, ...]:
        """Export them afresh."""

    @abstractmethod
    def everything(self) -> list[bytes]:
        """Every byte of every storage, as the engine sees it."""

    @abstractmethod
    def overwrite(self, storages: Sequence[bytes]) -> None:
        """Write every byte, and wait."""

    @abstractmethod
    def queue(self, storages: Sequence[bytes]) -> bytes:
        """Write every byte as a model does: queued. Returns the event to wait for."""

    @abstractmethod
    def proof(self) -> MemoryProof | None:
        """A proof for one attach, if this kind of memory needs one."""

    @abstractmethod
    def proven(self) -> bool:
        """The daemon has answered."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""

    def block(self, block: int, layers: range = range(NUM_LAYERS)) -> bytes:
        """The bytes of a block."""
        return block_in(self.layout, self.everything(), block, layers)


class CpuMemory(KvMemory):
    """Memory of this process, shared through files."""

    def __init__(self, layout: CacheLayout, seed: int) -> None:
        self.layout = layout
        self._cache = Cache(layout, seed)

    def handles(self) -> tuple[StorageHandle, ...]:
        return self._cache.handles

    def everything(self) -> list[bytes]:
        return self._cache.everything()

    def overwrite(self, storages: Sequence[bytes]) -> None:
        for memory, new in zip(self._cache.memories, storages, strict=True):
            memory[:] = new

    def queue(self, storages: Sequence[bytes]) -> bytes:
        self.overwrite(storages)
        return b""

    def proof(self) -> MemoryProof | None:
        return None

    def proven(self) -> bool:
        return True

    def close(self) -> None:
        self._cache.close()


class DeviceProcess:
    """A process with a device of its own, which answers commands until it is closed."""

    def __init__(self, module: str, *arguments: str) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(START_S)
        self._socket = ours
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=_environment(),
            )
        #: What it says once it has its device.
        self.ready = self.ask("ready")

    def ask(self, command: str, *args: Any) -> Any:
        send(self._socket, (command, args))
        return receive(self._socket)

    def kill(self) -> None:
        """As a crash."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self._socket.close()
        self.process.wait(START_S)


def _environment() -> dict[str, str]:
    """An engine's environment: without what a daemon's device has set for its own process."""
    path = os.pathsep.join(str(ROOT / part) for part in ("common", "tools", "."))
    ours = {"TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF"}
    return {**{k: v for k, v in os.environ.items() if k not in ours}, "PYTHONPATH": path}


def send(link: socket.socket, message: Any) -> None:
    frame = msgspec.msgpack.encode(message)
    link.sendall(struct.pack("<Q", len(frame)) + frame)


def receive(link: socket.socket) -> Any:
    return msgspec.msgpack.decode(_exactly(link, struct.unpack("<Q", _exactly(link, 8))[0]))


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise EOFError("the other process has ended")
        data += part
    return bytes(data)


class DeviceMemory(KvMemory):
    """Memory of a device, in a process of its own."""

    def __init__(self, process: DeviceProcess, layout: CacheLayout, seed: int) -> None:
        self.layout = layout
        self.process = process
        process.ask("make", contents(layout, seed))

    def handles(self) -> tuple[StorageHandle, ...]:
        return msgspec.convert(self.process.ask("handles"), tuple[StorageHandle, ...])

    def everything(self) -> list[bytes]:
        found: list[bytes] = self.process.ask("everything")
        return found

    def overwrite(self, storages: Sequence[bytes]) -> None:
        self.process.ask("overwrite", storages)

    def queue(self, storages: Sequence[bytes]) -> bytes:
        event: bytes = self.process.ask("queue", storages)
        return event

    def proof(self) -> MemoryProof | None:
        return msgspec.convert(self.process.ask("proof"), MemoryProof)

    def proven(self) -> bool:
        return bool(self.process.ask("proven"))

    def close(self) -> None:
        self.process.ask("drop")
