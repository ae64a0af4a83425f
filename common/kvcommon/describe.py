"""From the tensors that vLLM registers to the layout that travels in ``Attach``.

Every layout of every backend is described by one rule (``kvcommon.segments``): find the dimension
that counts blocks, and take the byte runs of the rest. The bytes described are exactly those of the
tensors: whatever lies between them (padding, another layer) belongs to nobody.

torch is imported by ``describe_cache`` only; ``layout_digest`` needs none.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvcommon.errors import ConfigError
from kvcommon.layout import CacheLayout, GroupLayout, Layer, Plane
from kvcommon.segments import (
    addresses_once,
    block_axis,
    block_segments,
    other_block_clash,
    physical_order,
    span,
    subtract,
)

if TYPE_CHECKING:
    import torch

    #: What vLLM registers for a layer: one tensor, or planes of it.
    CacheValue = torch.Tensor | Sequence["torch.Tensor"]

_log = logging.getLogger("vllm.kvferry.describe")


class GroupSpec(NamedTuple):
    """One KV cache group as vLLM's configuration names it."""

    group: int
    #: Tokens in a block of the manager.
    block_size: int
    #: Blocks of the manager.
    num_blocks: int
    #: The layer table: its order is the order of layers in stored objects.
    layer_names: Sequence[str]


def describe_cache(
    kv_caches: "Mapping[str, CacheValue]", groups: Sequence[GroupSpec]
) -> "tuple[CacheLayout, list[torch.UntypedStorage]]":
    """Describe a rank's KV cache.

    Within a group, a plane that another layer has registered already (layers that share their KV
    cache) is left out, and so are the bytes that an earlier plane covers; what was left out is
    logged. Groups may lie over each other: a block id belongs to one group at a time.

    Args:
        kv_caches: What ``register_kv_caches`` was given: layer name → tensor, list or tuple.
        groups: Every group of this rank. Each layer of ``kv_caches`` is in one of them.

    Returns:
        The layout, and its storages in the order of ``Plane.storage``.

    Raises:
        ConfigError: a layer is missing, in no group, on another device, or its tensors cannot be
            described; the text names the layer.
    """
    table = _StorageTable()
    layouts = tuple(_describe_group(kv_caches, spec, table) for spec in groups)
    listed = {name for spec in groups for name in spec.layer_names}
    for name in kv_caches:
        if name not in listed:
            raise ConfigError(
                f"layer {name} has a KV cache but is in no KV cache group, so its "
                "bytes would be neither saved nor loaded; this model is not supported"
            )
    sizes = tuple(storage.nbytes() for storage in table.storages)
    return CacheLayout(groups=layouts, storage_bytes=sizes), table.storages


class _StorageTable:
    """The distinct storages, numbered by first use."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._index: dict[int, int] = {}
        self._device = ""

    def add(self, layer: str, tensor: "torch.Tensor") -> int:
        """Return the number of a tensor's storage."""
        device = str(tensor.device)
        if self._device and device != self._device:
            raise ConfigError(
                f"layer {layer} lies on {device}, others on {self._device}: KV "
                "offloading by another means cannot be combined with kvferry"
            )
        self._device = device
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address:
            raise ConfigError(f"layer {layer} has no memory yet (device {device})")
        if address not in self._index:
            self._index[address] = len(self.storages)
            self.storages.append(storage)
        return self._index[address]


def _describe_group(
    kv_caches: "Mapping[str, CacheValue]", spec: GroupSpec, table: _StorageTable
) -> GroupLayout:
    if spec.num_blocks < 1 or spec.block_size < 1:
        raise ConfigError(
            f"KV cache group {spec.group} has {spec.num_blocks} blocks of {spec.block_size} tokens"
        )
    taken = _Taken(spec)
    layers = []
    for name in spec.layer_names:
        if name not in kv_caches:
            raise ConfigError(f"layer {name} of KV cache group {spec.group} was not registered")
        planes = []
        for tensor in _tensors(name, kv_caches[name]):
            storage = table.add(name, tensor)
            plane = taken.claim(name, _describe_plane(name, tensor, spec, storage, table))
            if plane is not None:
                planes.append(plane)
        if planes:
            layers.append(Layer(name=name, planes=tuple(planes)))
    if not layers:
        raise ConfigError(f"KV cache group {spec.group} has no layers")
    return GroupLayout(
        group=spec.group,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        layers=tuple(layers),
    )


def _tensors(layer: str, value: object) -> "Iterator[torch.Tensor]":
    """Yield the tensors of a layer in plane order, leaving out what holds nothing."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise ConfigError(f"layer {layer} has a {value.layout} KV cache, not a strided one")
        if value.numel():
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(layer, part)
    elif value is not None:
        raise ConfigError(
            f"layer {layer} has a KV cache of type {type(value).__name__}, "
            "not a tensor, a list or a tuple"
        )


def _describe_plane(
    layer: str,
    tensor: "torch.Tensor",
    spec: GroupSpec,
    storage: int,
    table: _StorageTable,
) -> Plane:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    what = f"layer {layer}: a KV cache of shape {list(shape)} and strides {list(stride)}"
    found = block_axis(shape, spec.num_blocks, spec.block_size)
    if found is None:
        raise ConfigError(
            f"{what} has no dimension that counts {spec.num_blocks} blocks of "
            f"{spec.block_size} tokens; please report this layout"
        )
    axis, rows = found
    if not addresses_once(shape, stride, axis, spec.num_blocks * rows):
        raise ConfigError(f"{what} addresses bytes twice; please report this layout")
    item = tensor.element_size()
    plane = Plane(
        storage=storage,
        dtype=str(tensor.dtype),
        shape=shape,
        stride=stride,
        offset=int(tensor.storage_offset()) * item,
        block_stride=stride[axis] * item * rows,
        segments=block_segments(shape, stride, item, axis, rows),
    )
    end = span(plane.segments, plane.offset, plane.block_stride, spec.num_blocks)[1]
    if end > table.storages[storage].nbytes():
        raise ConfigError(
            f"{what} ends {end} bytes into a storage of {table.storages[storage].nbytes()} bytes"
        )
    return plane


class _Taken:
    """Which bytes of each block have an owner already, in one group."""

    def __init__(self, spec: GroupSpec) -> None:
        self._spec = spec
        #: (layer, plane) by storage, in the order of claims.
        self._planes: dict[int, list[tuple[str, Plane]]] = {}

    def claim(self, layer: str, plane: Plane) -> Plane | None:
        """Give a plane the bytes that are nobody's yet. None: there are none.

        Raises:
            ConfigError: bytes of one block are those of another block of an earlier plane.
        """
        owners = self._planes.setdefault(plane.storage, [])
        left = _absolute(plane)
        for owner, other in owners:
            theirs = self._shared(layer, plane, owner, other)
            if not theirs:
                continue
            rest = subtract(left, theirs)
            if rest != left:
                num_bytes = sum(n for _, n in left) - sum(n for _, n in rest)
                _log.info(
                    "layer %s: %d of %d bytes of each block are those of layer %s already; "
                    "left out here",
                    layer,
                    num_bytes,
                    plane.block_bytes,
                    owner,
                )
            left = rest
        if not left:
            return None
        segments = tuple((start - plane.offset, length) for start, length in left)
        owned = msgspec.structs.replace(plane, segments=segments)
        owners.append((layer, owned))
        return owned

    def _shared(
        self, layer: str, plane: Plane, owner: str, other: Plane
    ) -> tuple[tuple[int, int], ...]:
        """Bytes of block 0 of ``other`` if the two may share any, ascending."""
        blocks = self._spec.num_blocks
        start, end = span(plane.segments, plane.offset, plane.block_stride, blocks)
        first, last = span(other.segments, other.offset, other.block_stride, blocks)
        if end <= first or last <= start:
            return ()
        theirs = _absolute(other)
        if blocks > 1 and (
            plane.block_stride != other.block_stride
            or other_block_clash(_absolute(plane), theirs, plane.block_stride, blocks)
        ):
            raise ConfigError(
                f"layer {layer} lies over layer {owner} so that different blocks "
                "share bytes; please report this layout"
            )
        return theirs


def _absolute(plane: Plane) -> tuple[tuple[int, int], ...]:
    """Segments of block 0, counted from the start of the storage."""
    return tuple((plane.offset + start, length) for start, length in plane.segments)


def layout_digest(group: GroupLayout) -> str:
    """Digest what stored bytes of a group mean: 16 hexadecimal digits.

    Equal for caches whose blocks hold the same elements in the same order: number of layers, and
    for each plane its dtype, its segment lengths and the order and size of its dimensions within a
    block. Addresses, strides, the number of blocks and the names of layers do not count.
    """
    layers = [
        [
            (
                plane.dtype,
                [length for _, length in plane.segments],
                _order(plane, group),
            )
            for plane in layer.planes
        ]
        for layer in group.layers
    ]
    text = msgspec.json.encode((group.block_size, layers))
    return hashlib.sha256(text).hexdigest()[:16]


def _order(plane: Plane, group: GroupLayout) -> tuple[tuple[int, int], ...]:
    found = block_axis(plane.shape, group.num_blocks, group.block_size)
    if found is None:
        raise ConfigError(
            f"a plane of shape {list(plane.shape)} has no dimension that counts "
            f"{group.num_blocks} blocks of {group.block_size} tokens"
        )
    return physical_order(plane.shape, plane.stride, *found)
