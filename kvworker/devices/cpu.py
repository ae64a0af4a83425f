"""CPU memory as a device: KV caches in shared memory, copied by ``memmove``.

There is nothing to bind and nothing to synchronise: what the model process has stored before it
says so is there. ``memmove`` is called through ctypes, which lets go of the GIL for the copy.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import memmove

from kvcommon.layout import GroupLayout
from kvcommon.memory.cpu import map_handle
from kvcommon.memory.handles import StorageHandle
from kvworker.devices.base import Device, MappedStorage, Mapping, Packed
from kvworker.devices.pieces import PieceTable, copies, packed_copies


class CpuMapping(Mapping):
    """Storages of an engine on this host."""

    def __init__(self, storages: Sequence[MappedStorage], resources: ExitStack) -> None:
        """Take over mapped storages; ``resources`` unmaps them."""
        self.storages = storages
        self.table = PieceTable(storages)
        self._resources = resources

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._resources.close()


class CpuDevice(Device):
    """The CPU. Any number of daemons may each serve a ``cpu:<n>``: n only keeps them apart."""

    direct = True

    def __init__(self, name: str) -> None:
        """``name`` is ``cpu:<n>``."""
        self.name = name

    def bind_thread(self) -> None:
        """Do nothing: every thread of a process sees its memory."""

    def map(self, storages: Sequence[StorageHandle]) -> CpuMapping:
        """Map an engine's storages. Raises ``HandleError``; then nothing stays mapped."""
        with ExitStack() as undo:
            mapped = []
            for handle in storages:
                memory = map_handle(handle)
                undo.callback(memory.close)
                mapped.append(MappedStorage(memory.address, memory.size))
            return CpuMapping(mapped, undo.pop_all())

    def copy_in(
        self,
        mapping: Mapping,
        group: GroupLayout,
        layers: range,
        block_ids: Sequence[int],
        sources: Sequence[int],
    ) -> None:
        """Copy layers of objects at ``sources`` into blocks."""
        assert isinstance(mapping, CpuMapping)
        pieces = mapping.table.pieces(group)
        for memory, host, length in copies(pieces, layers, block_ids, sources):
            memmove(memory, host, length)

    def copy_out(
        self,
        mapping: Mapping,
        group: GroupLayout,
        layers: range,
        block_ids: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        """Copy layers of blocks to objects at ``targets``."""
        assert isinstance(mapping, CpuMapping)
        pieces = mapping.table.pieces(group)
        for memory, host, length in copies(pieces, layers, block_ids, targets):
            memmove(host, memory, length)

    def scatter(self, mapping: Mapping, group: GroupLayout, layers: range, packed: Packed) -> None:
        """Copy layers from packed memory into blocks."""
        assert isinstance(mapping, CpuMapping)
        pieces = mapping.table.pieces(group)
        for memory, host, length in packed_copies(pieces, layers, packed):
            memmove(memory, host, length)

    def gather(self, mapping: Mapping, group: GroupLayout, layers: range, packed: Packed) -> None:
        """Copy layers of blocks into packed memory."""
        assert isinstance(mapping, CpuMapping)
        pieces = mapping.table.pieces(group)
        for memory, host, length in packed_copies(pieces, layers, packed):
            memmove(host, memory, length)
