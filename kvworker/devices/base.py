"""What the daemon does with a device: map an engine's storages, copy blocks, own staging memory.

Threading: ``bind_thread`` is called once by each transfer thread before anything else. ``map`` and
``unmap`` are called by one thread only (imports and closes are serialised).
"""

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from kvcommon.errors import HandleError
from kvcommon.layout import GroupLayout
from kvcommon.memory.handles import MemoryProof, StorageHandle

#: Alignment of staging memory: Ascend registers host memory by pages of its IOMMU.
HOST_ALIGNMENT = 64 << 10


class MappedStorage(NamedTuple):
    """One storage of an engine in this process's address space (or device address space)."""

    address: int
    size: int


class Mapping(ABC):
    """An engine's storages, mapped. Usable by any bound thread until ``close``."""

    storages: Sequence[MappedStorage]

    @abstractmethod
    def close(self) -> None:
        """Unmap. The caller has made sure that nothing uses the mapping. Idempotent."""


class StagingMemory(ABC):
    """Memory that a store and a device both reach. Freed by ``close``, which is idempotent."""

    address: int
    num_bytes: int
    #: What it is to a transfer engine: ``cpu``, or the device's kind.
    location: str

    @abstractmethod
    def close(self) -> None:
        """Free it. The owner has made sure that nothing uses it."""


class HostStaging(StagingMemory):
    """Ordinary memory of this process."""

    location = "cpu"

    def __init__(self, num_bytes: int) -> None:
        """Reserve the address range; the kernel gives pages when they are touched."""
        self._buffer = mmap.mmap(-1, num_bytes + HOST_ALIGNMENT)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self.address = -(-start // HOST_ALIGNMENT) * HOST_ALIGNMENT
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Unmap."""
        self._buffer.close()


class Device(ABC):
    """An accelerator (or the CPU) as the daemon uses it."""

    #: ``cpu:0``, ``npu:3``, ``cuda:1``.
    name: str
    #: Stores may read and write the mapped KV memory themselves; no staging copy is needed.
    direct: bool
    #: What its memory is to a transfer engine.
    location: str = "cpu"

    @abstractmethod
    def bind_thread(self) -> None:
        """Give the calling thread a device context."""

    def allocate_staging(self, num_bytes: int, *, on_device: bool) -> StagingMemory:
        """Allocate memory to gather blocks in, for stores that cannot touch mapped memory.

        Args:
            num_bytes: Its size.
            on_device: The store can move the device's own memory.

        Raises:
            HandleError: there is not so much.
        """
        del on_device
        return HostStaging(num_bytes)

    def prove(self, proof: MemoryProof) -> bool:
        """Read the engine's scratch memory and answer in it. Called like ``map``, after it.

        Returns:
            True if this process can wait for the engine's events.

        Raises:
            HandleError: this is not the memory that the engine means.
        """
        cause = f"a proof of device memory ({proof.nonce:x}) on {self.name}"
        raise HandleError(cause, "start the daemon with the engine's device")

    def wait(self, mapping: Mapping, event: bytes) -> None:
        """Let what this thread copies next wait for an event of the mapping's engine.

        Args:
            mapping: The engine's storages.
            event: As the engine's clock gave it; empty: nothing to wait for.

        Raises:
            HandleError: no such event.
        """
        if event:
            del mapping
            raise HandleError(f"{self.name} has no events", "report this with both event logs")

    @abstractmethod
    def map(self, storages: Sequence[StorageHandle]) -> Mapping:
        """Map an engine's storages.

        Raises:
            HandleError: a handle cannot be mapped; the text says why and what to do.
        """

    def settle(self) -> None:  # noqa: B027 - the CPU is never behind
        """Wait until what this thread was told to wait for has happened.

        Before somebody who knows nothing of the device's streams touches its memory.
        """

    def regions(self, mapping: Mapping) -> Sequence[MappedStorage]:
        """What a store must know to reach every block of a mapping itself, without overlaps."""
        return mapping.storages

    @abstractmethod
    def copy_in(
        self,
        mapping: Mapping,
        group: GroupLayout,
        layers: range,
        block_ids: Sequence[int],
        sources: Sequence[int],
    ) -> None:
        """Copy layers of objects in host memory into blocks, and wait until it is done.

        Args:
            mapping: The engine's storages.
            group: Layout of the blocks.
            layers: Indices in the layer table, contiguous.
            block_ids: Destination blocks.
            sources: Host address of the *whole object* of each block.
        """

    @abstractmethod
    def copy_out(
        self,
        mapping: Mapping,
        group: GroupLayout,
        layers: range,
        block_ids: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        """Copy layers of blocks to objects in host memory, and wait until it is done."""

    @abstractmethod
    def scatter(
        self, mapping: Mapping, group: GroupLayout, layers: range, packed: "Packed"
    ) -> None:
        """Copy layers from packed memory into blocks, and wait until it is done."""

    @abstractmethod
    def gather(
        self, mapping: Mapping, group: GroupLayout, layers: range, packed: "Packed"
    ) -> None:
        """Copy layers of blocks into packed memory, and wait until it is done."""


class Packed(NamedTuple):
    """Layers of blocks in staging memory, packed so that neighbours can be copied in one go.

    Where blocks lie side by side in the KV cache, plane by plane, they do so here too: piece after
    piece of the layers (``pieces.Span``), and of each piece one slot per block. Else each block has
    one slot with all its pieces.
    """

    #: Where the first slot is.
    address: int
    num_slots: int
    block_ids: Sequence[int]
    #: The slot of each block.
    slots: Sequence[int]
