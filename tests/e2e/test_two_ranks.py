"""Tensor parallelism of two, one daemon per rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from localmaster import LocalMaster
from tests.e2e.engines import differs
from tests.e2e.stack import Stack, assert_same, block_digests, mooncake_file, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCK = 32
ENVIRON = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def pair(
    model: Path, master: LocalMaster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("pair")
    mooncake = mooncake_file(folder, master.address)
    with Stack(folder, model, mooncake, ("cpu:0", "cpu:1")) as running:
        yield running


def test_both_ranks_save_and_load(pair: Stack) -> None:
    words, other = prompt(1, 300), prompt(2, 300)
    with pair.engine(environ=ENVIRON, tensor_parallel_size=2) as engine:
        engine.call("wait_attached")
        wanted = engine.generate([words], max_tokens=2)
        engine.settle()
        saves, _ = pair.plans()
        saved = block_digests(engine, saves)
        assert len(saved) == 300 // BLOCK
        # The two ranks hold different heads.
        assert all(one != two for one, two in saved.values())
        engine.forget()
        assert_same(engine.generate([words], max_tokens=2), wanted)
        assert engine.call("counters")["hit_tokens"] == 300 // BLOCK * BLOCK
        engine.settle()
        _, loads = pair.plans()
        assert block_digests(engine, loads) == saved
        assert differs(engine.generate([other], max_tokens=2), wanted)
