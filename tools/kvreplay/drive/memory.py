"""A KV cache without a model: shared memory of a recorded layout, whose bytes can be checked."""

import mmap
import os
from types import TracebackType
from typing import Final

from kvcommon.layout import CacheLayout, GroupLayout, Plane
from kvcommon.memory.handles import FileHandle
from kvcommon.memory.page import ProgressPage
from kvreplay.drive.content import layer_bytes, poison
from kvreplay.drive.errors import DriveError

#: Largest KV cache that is made, all storages of a rank together.
MAX_BYTES: Final = 8 << 30


class KVMemory:
    """Storages and a progress page, owned by this process. Use as a context manager."""

    def __init__(self, layout: CacheLayout, seed: int) -> None:
        """Allocate.

        Raises:
            DriveError: too large, or the layout reaches beyond its storages.
        """
        total = sum(layout.storage_bytes)
        if not 0 < total <= MAX_BYTES:
            raise DriveError(
                f"the recorded KV cache has {total} bytes; at most {MAX_BYTES} are made"
            )
        self.layout = layout
        self.seed = seed
        self._groups = {group.group: group for group in layout.groups}
        _check(layout)
        self._fds: list[int] = []
        self._maps: list[mmap.mmap] = []
        for size in layout.storage_bytes:
            fd = os.memfd_create("kvreplay-kv", os.MFD_CLOEXEC)
            self._fds.append(fd)
            os.ftruncate(fd, size)
            self._maps.append(mmap.mmap(fd, size))
        self.page = ProgressPage.create()

    def __enter__(self) -> "KVMemory":  # noqa: PYI034 - Python 3.10 has no Self
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of the memory."""
        self.close()

    def handles(self) -> tuple[FileHandle, ...]:
        """What a daemon maps."""
        found = []
        for fd, memory in zip(self._fds, self._maps, strict=True):
            info = os.fstat(fd)
            found.append(
                FileHandle(
                    pid=os.getpid(),
                    fd=fd,
                    size=len(memory),
                    st_dev=info.st_dev,
                    st_ino=info.st_ino,
                )
            )
        return tuple(found)

    def num_layers(self, group: int) -> int:
        """Layers of a group; 0 if there is no such group."""
        found = self._groups.get(group)
        return len(found.layers) if found else 0

    def num_blocks(self, group: int) -> int:
        """Blocks of a group; 0 if there is no such group."""
        found = self._groups.get(group)
        return found.num_blocks if found else 0

    def write(self, group: int, block_id: int, layer: int, key: str) -> None:
        """Put the right bytes of a layer of an object into a block."""
        pieces = self._pieces(group, block_id, layer)
        total = sum(size for _, _, size in pieces)
        self._put(pieces, layer_bytes(self.seed, key, layer, total))

    def spoil(self, group: int, block_id: int) -> None:
        """Fill a block with what no object holds."""
        for layer in range(self.num_layers(group)):
            pieces = self._pieces(group, block_id, layer)
            self._put(pieces, poison(sum(size for _, _, size in pieces)))

    def is_right(self, group: int, block_id: int, layer: int, key: str) -> bool:
        """The layer of the block holds the object's bytes."""
        found = self._get(self._pieces(group, block_id, layer))
        return found == layer_bytes(self.seed, key, layer, len(found))

    def is_spoilt(self, group: int, block_id: int) -> bool:
        """Nobody has written into the block since ``spoil``."""
        for layer in range(self.num_layers(group)):
            found = self._get(self._pieces(group, block_id, layer))
            if found != poison(len(found)):
                return False
        return True

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        for memory in self._maps:
            memory.close()
        for fd in self._fds:
            os.close(fd)
        self._maps, self._fds = [], []
        self.page.close()

    def _pieces(self, group: int, block_id: int, layer: int) -> list[tuple[int, int, int]]:
        """Storage, offset and length of each segment, in the order of a stored object."""
        found = self._groups[group]
        return [
            (plane.storage, plane.offset + block_id * plane.block_stride + start, length)
            for plane in found.layers[layer].planes
            for start, length in plane.segments
        ]

    def _put(self, pieces: list[tuple[int, int, int]], data: bytes) -> None:
        at = 0
        for storage, offset, length in pieces:
            self._maps[storage][offset : offset + length] = data[at : at + length]
            at += length

    def _get(self, pieces: list[tuple[int, int, int]]) -> bytes:
        return b"".join(
            self._maps[storage][offset : offset + length] for storage, offset, length in pieces
        )


def _check(layout: CacheLayout) -> None:
    """A recorded layout is untrusted: nothing of it may reach outside its storage."""
    for group in layout.groups:
        for layer in group.layers:
            for plane in layer.planes:
                size = layout.storage_bytes[plane.storage : plane.storage + 1]
                if not size or plane.storage < 0 or not _fits(group, plane, size[0]):
                    raise DriveError(f"the recorded layout of {layer.name} leaves its storage")


def _fits(group: GroupLayout, plane: Plane, size: int) -> bool:
    if plane.offset < 0 or plane.block_stride < 0 or group.num_blocks < 1:
        return False
    last = plane.offset + (group.num_blocks - 1) * plane.block_stride
    return all(
        start >= 0 < length and last + start + length <= size for start, length in plane.segments
    )
