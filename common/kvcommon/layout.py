"""Where the bytes of a block are: planes, segments, layers, groups.

Addresses are never derived from a layer's position in a dict: layers are named, and the layer
table of a group (the order of ``GroupLayout.layers``) fixes the order of layers in a stored object.
A stored object is, for one block on one rank, the layers in table order, the planes of each layer
in plane order, and the segments of each plane in address order.
"""

import msgspec


class Plane(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of one layer: K, V, K and V together, a latent, a scale, …

    Block ``b`` consists of the bytes ``[offset + b * block_stride + s.0, … + s.1)`` of the storage
    for each segment ``s``.
    """

    #: Index into the storages of the attach.
    storage: int
    dtype: str
    shape: tuple[int, ...]
    #: Elements, as torch gives it.
    stride: tuple[int, ...]
    #: Byte offset of block 0 in the storage.
    offset: int
    #: Bytes from one block to the next.
    block_stride: int
    #: (offset within the block, length), bytes, ascending, merged where contiguous.
    segments: tuple[tuple[int, int], ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this plane."""
        return sum(length for _, length in self.segments)


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of the layer table."""

    name: str
    planes: tuple[Plane, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this layer."""
        return sum(plane.block_bytes for plane in self.planes)


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group: layers that share block ids."""

    group: int
    #: Tokens in a block.
    block_size: int
    #: Blocks that exist; ids run from 0, and 0 is vLLM's null block (never saved, never loaded).
    num_blocks: int
    #: The layer table.
    layers: tuple[Layer, ...]

    @property
    def object_bytes(self) -> int:
        """Size of one stored object of this group."""
        return sum(layer.block_bytes for layer in self.layers)


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of one rank."""

    groups: tuple[GroupLayout, ...]
    #: Bytes of each distinct storage.
    storage_bytes: tuple[int, ...]
