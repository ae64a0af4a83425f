"""CPU memory as a device: KV caches in shared memory, copied by ``memmove``.

There is nothing to bind and nothing to synchronise: what the model process has stored before it
says so is there. ``memmove`` is called through ctypes, which lets go of the GIL for the copy.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from ctypes import memmove

from kvcommon.layout import GroupLayout
from kvcommon.memory.cpu import map_handle
from kvcommon.memory.handles import StorageHandle
from kvworker.devices.base import Device, MappedStorage, Mapping
from kvworker.devices.pieces import GroupPieces, Piece


class CpuMapping(Mapping):
    """Storages of an engine on this host."""

    def __init__(self, storages: Sequence[MappedStorage], resources: ExitStack) -> None:
        """Take over mapped storages; ``resources`` unmaps them."""
        self.storages = storages
        self._resources = resources
        self._pieces: dict[int, GroupPieces] = {}

    def pieces(self, layout: GroupLayout) -> GroupPieces:
        """Return the pieces of a group, computed at the first call."""
        found = self._pieces.get(layout.group)
        if found is None or found.layout is not layout:
            found = self._pieces[layout.group] = GroupPieces(layout, self.storages)
        return found

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
        for memory, host, length in _copies(mapping, group, layers, block_ids, sources):
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
        for memory, host, length in _copies(mapping, group, layers, block_ids, targets):
            memmove(host, memory, length)


def _copies(
    mapping: Mapping,
    group: GroupLayout,
    layers: range,
    block_ids: Sequence[int],
    hosts: Sequence[int],
) -> Iterator[tuple[int, int, int]]:
    """Yield (address in the KV cache, address in host memory, bytes) of each copy."""
    assert isinstance(mapping, CpuMapping)
    pieces = mapping.pieces(group)
    for piece in pieces.span(layers.start, layers.stop).pieces:
        if piece.length == piece.stride == pieces.object_bytes:
            # Whole objects side by side in the cache: perhaps in host memory too.
            yield from _runs(piece, block_ids, hosts)
            continue
        address, stride, length, offset = piece
        for block, host in zip(block_ids, hosts, strict=True):
            yield address + block * stride, host + offset, length


def _runs(
    piece: Piece, block_ids: Sequence[int], hosts: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Merge neighbours: block after block in the cache and object after object in host memory."""
    length = piece.length
    memory = host = size = 0
    for block, at in zip(block_ids, hosts, strict=True):
        here = piece.address + block * length
        if size and here == memory + size and at == host + size:
            size += length
            continue
        if size:
            yield memory, host, size
        memory, host, size = here, at, length
    if size:
        yield memory, host, size
