"""References on the blocks of vLLM's own pool."""

import pytest
from vllm.v1.core.block_pool import BlockPool

from kvsched.blocks import HeldBlocks

NUM_BLOCKS = 8


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=NUM_BLOCKS, enable_caching=True, hash_block_size=16)


@pytest.fixture
def held(pool: BlockPool) -> HeldBlocks:
    made = HeldBlocks()
    made.bind(pool)
    return made


def test_without_a_pool() -> None:
    held = HeldBlocks()
    assert not held.bound
    assert held.num_blocks == 0
    with pytest.raises(AssertionError, match="no block pool"):
        held.hold((1,))
    with pytest.raises(AssertionError, match="no block pool"):
        held.free((1,))


def test_a_held_block_is_not_handed_out_again(pool: BlockPool, held: HeldBlocks) -> None:
    assert held.bound
    assert held.num_blocks == NUM_BLOCKS
    blocks = pool.get_new_blocks(3)
    ids = tuple(block.block_id for block in blocks)
    free = pool.get_num_free_blocks()
    held.hold(ids)
    assert [block.ref_cnt for block in blocks] == [2, 2, 2]
    # The request ends; the daemon may still touch its blocks.
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == free
    others = pool.get_new_blocks(free)
    assert not {block.block_id for block in others} & set(ids)
    held.free(ids)
    assert pool.get_num_free_blocks() == 3
    # The end of a prefix is handed out (and so evicted) before its beginning.
    assert [block.block_id for block in pool.get_new_blocks(3)] == list(reversed(ids))


def test_a_block_of_two_jobs_is_held_until_both_have_ended(
    pool: BlockPool, held: HeldBlocks
) -> None:
    blocks = pool.get_new_blocks(1)
    ids = (blocks[0].block_id,)
    held.hold(ids)
    held.hold(ids)
    pool.free_blocks(blocks)
    held.free(ids)
    assert blocks[0].ref_cnt == 1
    held.free(ids)
    assert blocks[0].ref_cnt == 0
