"""Where the bytes of blocks lie in mapped memory: the arithmetic of a layout, done once.

A *piece* is one contiguous run of bytes that every block has, at a fixed stride from block to
block. A *span* is what a range of layers occupies: its pieces, in the order of the stored object,
merged where they touch in memory as well as in the object.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvcommon.errors import HandleError
from kvcommon.layout import CacheLayout, GroupLayout, Plane
from kvworker.devices.base import MappedStorage, Packed
from kvworker.stores.base import RangeIO


class Piece(NamedTuple):
    """``length`` bytes at ``address + block * stride``, at ``offset`` of the stored object."""

    address: int
    stride: int
    length: int
    offset: int


class Span(NamedTuple):
    """A range of layers of one group."""

    #: Where its bytes begin in the stored object, and how many they are (without gaps).
    offset: int
    num_bytes: int
    pieces: tuple[Piece, ...]
    #: Of the pieces, as ``RangeIO`` wants them.
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    #: In every piece, neighbouring blocks touch.
    side_by_side: bool

    def addresses(self, block: int) -> list[int]:
        """Where the pieces of one block lie."""
        return [piece.address + block * piece.stride for piece in self.pieces]


class GroupPieces:
    """The pieces of every layer of a group, and of every range of layers that was asked for.

    Threading: may be shared; two threads may at worst compute the same span twice.
    """

    def __init__(self, layout: GroupLayout, storages: Sequence[MappedStorage]) -> None:
        """Compute the pieces of a layout that ``check_layout`` has accepted."""
        self.layout = layout
        self.object_bytes = layout.object_bytes
        self._layers: list[list[Piece]] = []
        self._spans: dict[tuple[int, int], Span] = {}
        offset = 0
        for layer in layout.layers:
            pieces = []
            for plane in layer.planes:
                base = storages[plane.storage].address + plane.offset
                for start, length in plane.segments:
                    pieces.append(Piece(base + start, plane.block_stride, length, offset))
                    offset += length
            self._layers.append(pieces)

    def span(self, first_layer: int, end_layer: int) -> Span:
        """Return layers ``[first_layer, end_layer)``, at least one, of the layer table."""
        span = self._spans.get((first_layer, end_layer))
        if span is None:
            pieces = _merge([p for layer in self._layers[first_layer:end_layer] for p in layer])
            span = Span(
                offset=pieces[0].offset,
                num_bytes=sum(piece.length for piece in pieces),
                pieces=pieces,
                sizes=tuple(piece.length for piece in pieces),
                offsets=tuple(piece.offset for piece in pieces),
                side_by_side=all(piece.length == piece.stride for piece in pieces),
            )
            self._spans[first_layer, end_layer] = span
        return span

    def holds(self, first_layer: int, end_layer: int, block_ids: Sequence[int]) -> bool:
        """Tell whether these layers and blocks exist (nothing outside may be touched)."""
        if not 0 <= first_layer < end_layer <= len(self._layers):
            return False
        if not block_ids:
            return True
        return min(block_ids) >= 0 and max(block_ids) < self.layout.num_blocks


def _merge(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    merged = [pieces[0]]
    for piece in pieces[1:]:
        last = merged[-1]
        if piece.stride == last.stride and piece.address == last.address + last.length:
            # Offsets in the object follow one another by construction.
            merged[-1] = last._replace(length=last.length + piece.length)
        else:
            merged.append(piece)
    return tuple(merged)


class PieceTable:
    """The pieces of every group of a mapping, computed when they are first asked for."""

    def __init__(self, storages: Sequence[MappedStorage]) -> None:
        """Remember where the storages are."""
        self._storages = storages
        self._pieces: dict[int, GroupPieces] = {}

    def pieces(self, layout: GroupLayout) -> GroupPieces:
        """Return the pieces of a group."""
        found = self._pieces.get(layout.group)
        if found is None or found.layout is not layout:
            found = self._pieces[layout.group] = GroupPieces(layout, self._storages)
        return found


def copies(
    pieces: GroupPieces, layers: range, block_ids: Sequence[int], hosts: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (address in the KV cache, address outside, bytes) of each copy.

    Args:
        pieces: Of the group.
        layers: Indices in the layer table, contiguous.
        block_ids: The blocks.
        hosts: Where the *whole object* of each block would begin outside of the cache.
    """
    for address, stride, length, offset in pieces.span(layers.start, layers.stop).pieces:
        if length == stride:
            # Blocks lie side by side in the cache: perhaps outside of it too.
            yield from _merged(address, length, block_ids, [host + offset for host in hosts])
            continue
        for block, host in zip(block_ids, hosts, strict=True):
            yield address + block * stride, host + offset, length


def packed_copies(
    pieces: GroupPieces, layers: range, packed: Packed
) -> Iterator[tuple[int, int, int]]:
    """Yield (address in the KV cache, address in staging memory, bytes) of each copy."""
    span = pieces.span(layers.start, layers.stop)
    base = packed.address
    for address, stride, length, offset in span.pieces:
        if span.side_by_side:
            hosts = [base + slot * length for slot in packed.slots]
            base += packed.num_slots * length
            yield from _merged(address, length, packed.block_ids, hosts)
            continue
        start = packed.address + offset - span.offset
        for block, slot in zip(packed.block_ids, packed.slots, strict=True):
            yield address + block * stride, start + slot * span.num_bytes, length


def packed_range(key: str, span: Span, packed: Packed, slot: int) -> RangeIO:
    """What a store reads or writes of the block in a slot of packed memory."""
    address = packed.address
    if not span.side_by_side:
        where = address + slot * span.num_bytes
        return RangeIO(key, (where,), (span.num_bytes,), (span.offset,))
    addresses = []
    for length in span.sizes:
        addresses.append(address + slot * length)
        address += packed.num_slots * length
    return RangeIO(key, addresses, span.sizes, span.offsets)


def _merged(
    address: int, length: int, block_ids: Sequence[int], hosts: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Merge neighbours: those that touch in the cache as well as outside."""
    memory = host = size = 0
    for block, at in zip(block_ids, hosts, strict=True):
        here = address + block * length
        if size and here == memory + size and at == host + size:
            size += length
            continue
        if size:
            yield memory, host, size
        memory, host, size = here, at, length
    if size:
        yield memory, host, size


def check_layout(layout: CacheLayout, storages: Sequence[MappedStorage]) -> None:
    """Make sure that every byte of every block lies inside its storage.

    Raises:
        HandleError: it does not; nothing of this layout may be touched.
    """
    if len(layout.storage_bytes) != len(storages):
        cause = f"the layout speaks of {len(layout.storage_bytes)} storages, not {len(storages)}"
        raise HandleError(cause)
    for index, (said, storage) in enumerate(zip(layout.storage_bytes, storages, strict=True)):
        if said != storage.size:
            raise HandleError(f"storage {index} has {storage.size} bytes, the layout says {said}")
    for group in layout.groups:
        if group.num_blocks < 1 or group.object_bytes < 1:
            raise HandleError(f"group {group.group} of the layout has no blocks or no bytes")
        for layer in group.layers:
            if not layer.planes:
                raise HandleError(f"layer {layer.name} of the layout has no planes")
            for number, plane in enumerate(layer.planes):
                where = f"plane {number} of layer {layer.name}"
                _check_plane(plane, group.num_blocks, layout.storage_bytes, where)


def _check_plane(plane: Plane, num_blocks: int, storage_bytes: Sequence[int], where: str) -> None:
    if not 0 <= plane.storage < len(storage_bytes):
        raise HandleError(f"{where} names storage {plane.storage} of {len(storage_bytes)}")
    if plane.offset < 0 or plane.block_stride < 1 or not plane.segments:
        raise HandleError(f"{where} has no segments, or a negative offset or stride")
    if any(start < 0 or length < 1 for start, length in plane.segments):
        raise HandleError(f"{where} has an empty or negative segment")
    end = max(start + length for start, length in plane.segments)
    end += plane.offset + (num_blocks - 1) * plane.block_stride
    if end > storage_bytes[plane.storage]:
        cause = f"{where} ends at byte {end} of a storage of {storage_bytes[plane.storage]}"
        raise HandleError(cause)
