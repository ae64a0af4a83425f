"""References on vLLM's blocks, held per job (rule 1).

vLLM's block pool counts references; ours keep a block from being handed out again while a daemon
may touch it, whatever happens to the request. ``bind_gpu_block_pool`` gives us the pool (vLLM 0.23
and later).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class HeldBlocks:
    """Takes and returns references. Threading: vLLM's scheduler thread alone."""

    def __init__(self) -> None:
        """Start without a pool; nothing can be held before ``bind``."""
        self._pool: BlockPool | None = None

    @property
    def bound(self) -> bool:
        """Whether vLLM has given us its pool."""
        return self._pool is not None

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included; 0 before ``bind``."""
        return len(self._pool.blocks) if self._pool is not None else 0

    def bind(self, pool: "BlockPool") -> None:
        """Remember vLLM's ``BlockPool``."""
        self._pool = pool

    def hold(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each block."""
        assert self._pool is not None, "vLLM has given no block pool yet"
        blocks = self._pool.blocks
        self._pool.touch([blocks[block_id] for block_id in block_ids])

    def free(self, block_ids: Sequence[int]) -> None:
        """Give one reference of each block back; the last block of a prefix is evicted first."""
        assert self._pool is not None, "vLLM has given no block pool yet"
        blocks = self._pool.blocks
        self._pool.free_blocks([blocks[block_id] for block_id in reversed(block_ids)])
