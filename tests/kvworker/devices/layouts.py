"""Small KV caches of every shape that matters, in shared memory, and what is in their blocks."""

import ctypes
import os
import random
from collections.abc import Sequence

from kvcommon.layout import CacheLayout, GroupLayout, Layer, Plane
from kvcommon.memory.cpu import Mapped, map_handle
from kvcommon.memory.handles import FileHandle

NUM_BLOCKS = 7
NUM_LAYERS = 4


def plane(
    storage: int, offset: int, stride: int, segments: tuple[tuple[int, int], ...] = ((0, 96),)
) -> Plane:
    return Plane(
        storage=storage,
        dtype="torch.uint8",
        shape=(NUM_BLOCKS, segments[0][1]),
        stride=(stride, 1),
        offset=offset,
        block_stride=stride,
        segments=segments,
    )


def cache(layers: list[list[Plane]], storage_bytes: tuple[int, ...]) -> CacheLayout:
    table = tuple(
        Layer(name=f"model.layers.{index}", planes=tuple(planes))
        for index, planes in enumerate(layers)
    )
    group = GroupLayout(group=0, block_size=16, num_blocks=NUM_BLOCKS, layers=table)
    return CacheLayout(groups=(group,), storage_bytes=storage_bytes)


def one_storage() -> CacheLayout:
    """All layers in one storage, one after another (vLLM 0.29 and later)."""
    size = NUM_BLOCKS * 96
    layers = [[plane(0, index * size, 96)] for index in range(NUM_LAYERS)]
    return cache(layers, (NUM_LAYERS * size,))


def storage_per_layer() -> CacheLayout:
    """Each layer in a storage of its own (vLLM up to 0.28)."""
    layers = [[plane(index, 0, 96)] for index in range(NUM_LAYERS)]
    return cache(layers, (NUM_BLOCKS * 96,) * NUM_LAYERS)


def two_planes() -> CacheLayout:
    """K and V apart, of different sizes, at odd offsets, with gaps between blocks."""
    layers = [
        [plane(0, 64 + index * 2048, 112), plane(1, 8 + index * 1024, 80, ((8, 40),))]
        for index in range(NUM_LAYERS)
    ]
    return cache(layers, (NUM_LAYERS * 2048 + 64, NUM_LAYERS * 1024 + 8))


def head_segments() -> CacheLayout:
    """Heads outside of blocks: every block is as many pieces as there are heads."""
    heads, piece = 3, 32
    segments = tuple((head * NUM_BLOCKS * piece, piece) for head in range(heads))
    size = heads * NUM_BLOCKS * piece
    layers = [[plane(0, index * size, piece, segments)] for index in range(NUM_LAYERS)]
    return cache(layers, (NUM_LAYERS * size,))


def layers_in_block() -> CacheLayout:
    """All layers of a block side by side: the object as it is stored."""
    stride = NUM_LAYERS * 96
    layers = [[plane(0, index * 96, stride)] for index in range(NUM_LAYERS)]
    return cache(layers, (NUM_BLOCKS * stride,))


LAYOUTS = {
    maker.__name__: maker
    for maker in (one_storage, storage_per_layer, two_planes, head_segments, layers_in_block)
}


def block_in(
    layout: CacheLayout,
    memories: Sequence[bytes | memoryview],
    block: int,
    layers: range = range(NUM_LAYERS),
    group: int = 0,
) -> bytes:
    """The bytes of a block as an object holds them, addressed the slow and obvious way."""
    out = b""
    for index in layers:
        for part in layout.groups[group].layers[index].planes:
            for start, length in part.segments:
                at = part.offset + block * part.block_stride + start
                out += bytes(memories[part.storage][at : at + length])
    return out


class Cache:
    """KV memory of an engine: storages in shared memory, addressed the slow and obvious way."""

    def __init__(self, layout: CacheLayout, seed: int) -> None:
        self.layout = layout
        self.handles = tuple(_file(size) for size in layout.storage_bytes)
        self._mapped = [map_handle(handle) for handle in self.handles]
        self.fill(seed)

    def fill(self, seed: int) -> None:
        random_bytes = random.Random(seed)
        for memory in self.memories:
            memory[:] = random_bytes.randbytes(len(memory))

    @property
    def memories(self) -> list[memoryview]:
        return [_view(mapped) for mapped in self._mapped]

    def block(self, block: int, layers: range = range(NUM_LAYERS), group: int = 0) -> bytes:
        """The bytes of a block as an object holds them."""
        return block_in(self.layout, self.memories, block, layers, group)

    def everything(self) -> list[bytes]:
        return [bytes(memory) for memory in self.memories]

    def close(self) -> None:
        for mapped, handle in zip(self._mapped, self.handles, strict=True):
            mapped.close()
            os.close(handle.fd)


def _view(mapped: Mapped) -> memoryview:
    return memoryview((ctypes.c_ubyte * mapped.size).from_address(mapped.address)).cast("B")


def _file(size: int) -> FileHandle:
    fd = os.memfd_create("kv")
    os.ftruncate(fd, size)
    info = os.fstat(fd)
    return FileHandle(pid=os.getpid(), fd=fd, size=size, st_dev=info.st_dev, st_ino=info.st_ino)
