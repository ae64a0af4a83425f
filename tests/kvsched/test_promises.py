"""What vLLM counts on, kept for the case that nobody plans it."""

from kvsched.core.commands import ModelLoad
from kvsched.promises import Promises

BLOCK = 16


def test_an_admitted_offer_names_the_blocks_beyond_vllms_own() -> None:
    promises = Promises(BLOCK)
    promises.offered("r", 2 * BLOCK, asynchronous=False)
    promises.admitted("r", (7, 8, 9, 10, 11), 2 * BLOCK)
    (load,) = promises.take()
    assert load == ModelLoad(job_id=-1, request_id="r", layerwise=True, block_ids=(9, 10))
    assert promises.take() == ()


def test_a_block_of_which_one_token_is_left_to_compute_counts_whole() -> None:
    promises = Promises(BLOCK)
    promises.offered("r", 0, asynchronous=True)
    promises.admitted("r", (1, 2, 3), 2 * BLOCK - 1)
    (load,) = promises.take()
    assert load.block_ids == (1, 2)
    assert not load.layerwise


def test_nothing_is_owed_where_vllm_took_nothing() -> None:
    promises = Promises(BLOCK)
    promises.offered("r", 0, asynchronous=False)
    promises.admitted("r", (1, 2), 0)
    assert promises.take() == ()


def test_the_last_offer_counts() -> None:
    promises = Promises(BLOCK)
    promises.offered("r", 0, asynchronous=False)
    promises.offered("r", BLOCK, asynchronous=True)
    promises.admitted("r", (1, 2), BLOCK)
    (load,) = promises.take()
    assert load.block_ids == (2,)
    assert not load.layerwise


def test_tokens_that_were_never_offered_count_from_the_start() -> None:
    promises = Promises(BLOCK)
    promises.offered("r", BLOCK, asynchronous=True)
    promises.forget("r")
    promises.forget("r")
    promises.admitted("r", (1, 2), BLOCK)
    (load,) = promises.take()
    assert load.block_ids == (1,)
    assert load.layerwise


def test_ids_are_never_those_of_jobs_and_never_come_back() -> None:
    promises = Promises(BLOCK)
    seen = []
    for _ in range(2):
        promises.admitted("a", (1,), BLOCK)
        promises.admitted("b", (2,), BLOCK)
        seen += [load.job_id for load in promises.take()]
    assert len(set(seen)) == 4
    assert max(seen) < 0
