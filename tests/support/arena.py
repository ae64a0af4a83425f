"""Page-aligned memory for tests of stores, with seeded bytes and pieces of objects in it."""

import ctypes
import mmap
import random

from kvworker.stores.base import RangeIO, Store


class Arena:
    """Anonymous memory of this process, cut into objects of one size."""

    def __init__(self, object_size: int, count: int = 1, seed: int | None = None) -> None:
        self.object_size = object_size
        self.size = object_size * count
        self.memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if seed is not None:
            self.memory[:] = random.Random(seed).randbytes(self.size)

    def object(self, index: int = 0) -> bytes:
        """The bytes of one object."""
        return self.memory[index * self.object_size : (index + 1) * self.object_size]

    def piece(self, key: str, index: int = 0, start: int = 0, end: int | None = None) -> RangeIO:
        """One contiguous part of an object, at its own place in the arena."""
        end = self.object_size if end is None else end
        address = self.address + index * self.object_size + start
        return RangeIO(key, [address], [end - start], [start])

    def layers(self, key: str, index: int, layers: range, layer_size: int) -> RangeIO:
        """Layers of an object as separate buffers, each in two halves."""
        half = layer_size // 2
        offsets = [at for layer in layers for at in (layer * layer_size, layer * layer_size + half)]
        base = self.address + index * self.object_size
        return RangeIO(key, [base + at for at in offsets], [half] * len(offsets), offsets)


def put(store: Store, arena: Arena, *keys: str) -> None:
    """Store object i of the arena under the i-th key."""
    sizes = [arena.object_size] * len(keys)
    pieces = [arena.piece(key, i) for i, key in enumerate(keys)]
    for answer in (store.put_start(keys, sizes), store.put_ranges(pieces), store.put_end(keys)):
        assert {outcome.value for outcome in answer} == {"ok"}, answer


def get(store: Store, arena: Arena, key: str, index: int = 0) -> bytes:
    """Read a whole object by a ranged read."""
    assert [outcome.value for outcome in store.get_start([key])] == ["ok"]
    try:
        answer = store.get_ranges([arena.piece(key, index)])
        assert [outcome.value for outcome in answer] == ["ok"]
    finally:
        store.get_end([key])
    return arena.object(index)
