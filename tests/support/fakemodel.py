"""A model side without a model: some shared memory that looks like a KV cache.

Run as a program it attaches, says so, and waits to be killed.
"""

import ctypes
import mmap
import os
import sys

from kvcommon.keys import Namespace, fingerprint
from kvcommon.layout import CacheLayout, GroupLayout, Layer, Plane
from kvcommon.memory.handles import FileHandle
from kvcommon.memory.page import ProgressPage
from kvcommon.messages import Attach, Attached
from tests.support.client import Client

NUM_LAYERS, NUM_BLOCKS, PLANE_BLOCK_BYTES = 3, 16, 512
_PLANE_BYTES = NUM_BLOCKS * PLANE_BLOCK_BYTES
_SIZE = NUM_LAYERS * 2 * _PLANE_BYTES


#: Identity of what is stored.
NAMESPACE = Namespace(
    model="fake",
    revision="1",
    dtype="torch.float16",
    cache_dtype="auto",
    block_sizes=(16,),
    layout=("fake",),
    layers=(0, NUM_LAYERS),
    tensor_parallel=1,
    pipeline_parallel=1,
    rank=(0, 0),
    hash_algorithm="sha256",
    hash_seed="0",
)
FINGERPRINT = fingerprint(NAMESPACE)


class FakeModel:
    """One storage of ``NUM_LAYERS`` layers with a K and a V plane each, and a progress page."""

    def __init__(self, device: str = "cpu:0") -> None:
        self.device = device
        self._fd = os.memfd_create("kvferry-test-kv")
        os.ftruncate(self._fd, _SIZE)
        self.memory = mmap.mmap(self._fd, _SIZE)
        self.page = ProgressPage.create()

    @property
    def inode(self) -> int:
        """Of the shared memory, to find it among mappings."""
        return os.fstat(self._fd).st_ino

    @property
    def layout(self) -> CacheLayout:
        """Where the blocks are."""
        layers = tuple(
            Layer(
                name=f"layer{layer}",
                planes=tuple(_plane((layer * 2 + plane) * _PLANE_BYTES) for plane in range(2)),
            )
            for layer in range(NUM_LAYERS)
        )
        group = GroupLayout(group=0, block_size=16, num_blocks=NUM_BLOCKS, layers=layers)
        return CacheLayout(groups=(group,), storage_bytes=(_SIZE,))

    def attach(self, lease_ms: int = 0) -> Attach:
        """What it says to be mapped."""
        status = os.fstat(self._fd)
        handle = FileHandle(
            pid=os.getpid(),
            fd=self._fd,
            size=_SIZE,
            st_dev=status.st_dev,
            st_ino=status.st_ino,
        )
        return Attach(
            pid=os.getpid(),
            device=self.device,
            storages=(handle,),
            layout=self.layout,
            page=self.page.handle,
            namespace=NAMESPACE,
            lease_ms=lease_ms,
        )

    def block(self, block: int) -> bytes:
        """All bytes of one block, in the order of a stored object."""
        return b"".join(self.memory[start:end] for start, end in _ranges(block))

    def fill(self, block: int, seed: int) -> bytes:
        """Write recognisable bytes into a block and return them."""
        for number, (start, end) in enumerate(_ranges(block)):
            value = (seed * 31 + number * 7) % 255 + 1
            self.memory[start:end] = bytes([value]) * (end - start)
        return self.block(block)

    def write(self, block: int, data: bytes) -> None:
        """Write all bytes of one block, in the order of a stored object."""
        at = 0
        for start, end in _ranges(block):
            self.memory[start:end] = data[at : at + end - start]
            at += end - start

    def clear(self, block: int) -> None:
        """Zero a block."""
        for start, end in _ranges(block):
            self.memory[start:end] = bytes(end - start)

    def close(self) -> None:
        """Give the memory back."""
        self.page.close()
        self.memory.close()
        os.close(self._fd)


def _plane(offset: int) -> Plane:
    return Plane(
        storage=0,
        dtype="torch.uint8",
        shape=(NUM_BLOCKS, PLANE_BLOCK_BYTES),
        stride=(PLANE_BLOCK_BYTES, 1),
        offset=offset,
        block_stride=PLANE_BLOCK_BYTES,
        segments=((0, PLANE_BLOCK_BYTES),),
    )


def _ranges(block: int) -> list[tuple[int, int]]:
    """Where the planes of a block lie, in layer-table order."""
    starts = [plane * _PLANE_BYTES + block * PLANE_BLOCK_BYTES for plane in range(2 * NUM_LAYERS)]
    return [(start, start + PLANE_BLOCK_BYTES) for start in starts]


def main() -> None:
    """Attach to the daemon at ``argv[1]`` as engine ``argv[2]``, print the inode, wait."""
    # If the test dies, so do we.
    ctypes.CDLL(None).prctl(1, 9)
    model = FakeModel()
    with Client(sys.argv[1], "model", engine=sys.argv[2]) as control:
        control.say(model.attach())
        control.hear(Attached)
        sys.stdout.write(f"{model.inode}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
