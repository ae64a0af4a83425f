"""One rank, one daemon, the real Mooncake: layerwise (auto), most cases of prompts."""

from collections.abc import Iterator

import pytest

from tests.e2e.engines import EngineProcess, differs
from tests.e2e.stack import Stack, assert_same, block_digests, cold, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BLOCK = 32


@pytest.fixture(scope="module")
def engine(stack: Stack) -> Iterator[EngineProcess]:
    # 128 tokens per step: a prompt of 1,100 tokens is prefilled in nine chunks.
    with stack.engine(max_num_batched_tokens=128) as running:
        running.call("wait_attached")
        yield running


def external_tokens(engine: EngineProcess) -> float:
    return float(engine.call("counters")["hit_tokens"])


def test_saved_in_chunks_and_loaded_after_the_local_cache_is_gone(
    stack: Stack, engine: EngineProcess, reference: EngineProcess
) -> None:
    words = prompt(1, 1100)
    wanted = cold(reference, [words])
    assert_same(engine.generate([words]), wanted)
    engine.settle()
    saves, _ = stack.plans()
    saved = block_digests(engine, saves)
    assert len(saved) == 1100 // BLOCK
    assert len({job.job_id for job in saves}) >= 8
    engine.forget()
    before = external_tokens(engine)
    again = engine.generate([words])
    assert_same(again, wanted)
    assert external_tokens(engine) - before == 1100 // BLOCK * BLOCK
    engine.settle()
    _, loads = stack.plans()
    loaded = block_digests(engine, loads)
    assert loaded == saved
    # Negative control: one altered block changes the answer.
    engine.call("spoil", block_id=loads[0].block_ids[3])
    assert differs(engine.generate([words]), wanted)
    engine.forget()


def test_a_changed_prompt_is_not_the_same(engine: EngineProcess, reference: EngineProcess) -> None:
    words = prompt(2, 300)
    wanted = cold(reference, [words])
    engine.generate([words])
    engine.forget()
    changed = [*prompt(3, 64), *words[64:]]
    before = external_tokens(engine)
    assert differs(engine.generate([changed]), wanted)
    assert external_tokens(engine) == before


@pytest.mark.parametrize(
    ("length", "external"),
    [
        pytest.param(20, 0, id="shorter than a block"),
        pytest.param(10 * BLOCK, 10 * BLOCK - 1, id="a multiple of the block"),
        pytest.param(10 * BLOCK + 1, 10 * BLOCK, id="one more than a multiple"),
    ],
)
def test_full_prompt_hit(
    engine: EngineProcess, reference: EngineProcess, length: int, external: int
) -> None:
    words = prompt(100 + length, length)
    wanted = cold(reference, [words])
    assert_same(engine.generate([words]), wanted)
    engine.forget()
    before = external_tokens(engine)
    assert_same(engine.generate([words]), wanted)
    assert external_tokens(engine) - before == external
    engine.forget()


def test_several_requests_share_a_prefix_in_one_step(
    engine: EngineProcess, reference: EngineProcess
) -> None:
    shared = prompt(4, 8 * BLOCK)
    prompts = [[*shared, *prompt(40 + i, 10)] for i in range(4)]
    wanted = cold(reference, prompts)
    engine.generate([shared])
    engine.forget()
    before = external_tokens(engine)
    assert_same(engine.generate(prompts), wanted)
    assert external_tokens(engine) - before >= 8 * BLOCK
    engine.forget()


def test_blocks_come_back_to_the_pool(engine: EngineProcess) -> None:
    free = engine.settle()["free"]
    for i in range(3):
        engine.generate([prompt(200 + i, 500), prompt(300 + i, 200)])
    assert engine.settle()["free"] == free
