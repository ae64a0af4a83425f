"""What the daemon does with a device: map an engine's storages, copy blocks.

Threading: ``bind_thread`` is called once by each transfer thread before anything else. ``map`` and
``unmap`` are called by one thread only (imports and closes are serialised).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from kvcommon.layout import GroupLayout
from kvcommon.memory.handles import StorageHandle


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


class Device(ABC):
    """An accelerator (or the CPU) as the daemon uses it."""

    #: ``cpu:0``, ``npu:3``, ``cuda:1``.
    name: str
    #: Stores may read and write the mapped KV memory themselves; no staging copy is needed.
    direct: bool

    @abstractmethod
    def bind_thread(self) -> None:
        """Give the calling thread a device context."""

    @abstractmethod
    def map(self, storages: Sequence[StorageHandle]) -> Mapping:
        """Map an engine's storages.

        Raises:
            HandleError: a handle cannot be mapped; the text says why and what to do.
        """

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
