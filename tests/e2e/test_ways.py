"""The ways an engine can use the store: load modes, roles, inline, decode, several engines."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcommon.eventlog import read_log
from kvworker.core.commands import WorkerCommand, WriteLayers
from localmaster import LocalMaster
from tests.e2e.engines import EngineProcess, differs
from tests.e2e.stack import Stack, assert_same, block_digests, cold, mooncake_file, prompt
from tinymodel import ModelSpec, make_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BLOCK = 32
worker_commands = msgspec.msgpack.Decoder(list[WorkerCommand])


def save_and_load(stack: Stack, engine: EngineProcess, reference: EngineProcess, seed: int) -> None:
    """Cold, then an external hit in the same engine; tokens, logprobs and bytes equal."""
    words = prompt(seed, 700)
    wanted = cold(reference, [words])
    assert_same(engine.generate([words]), wanted)
    engine.forget()
    before = engine.call("counters")["hit_tokens"]
    assert_same(engine.generate([words]), wanted)
    assert engine.call("counters")["hit_tokens"] - before == 700 // BLOCK * BLOCK
    engine.settle()
    _, loads = stack.plans()
    last = loads[-1]
    digests = block_digests(engine, [last])
    saves, _ = stack.plans()
    names = {name for job in saves for name in job.block_hashes}
    assert set(last.block_hashes) <= names
    engine.call("spoil", block_id=last.block_ids[0])
    assert block_digests(engine, [last]) != digests
    assert differs(engine.generate([words]), wanted)
    engine.forget()


@pytest.mark.parametrize("load", ["auto", "async"])
def test_load_mode(stack: Stack, reference: EngineProcess, load: str) -> None:
    with stack.engine(stack.connector(load=load)) as engine:
        engine.call("wait_attached")
        save_and_load(stack, engine, reference, 1000 + len(load))
        _, loads = stack.plans()
        # On CPU nothing overtakes a step, so a layerwise load may fail: auto takes it.
        assert loads[-1].layerwise == (load == "auto")
        # Two loads in one step and their followers.
        prompts = [prompt(1100 + i, 400) for i in range(3)]
        wanted = cold(reference, prompts)
        engine.generate(prompts)
        engine.forget()
        assert_same(engine.generate(prompts), wanted)


def test_inline(stack: Stack, reference: EngineProcess) -> None:
    connector = stack.connector(
        mode="inline",
        store="mooncake",
        mooncake_config=str(stack.mooncake),
        event_log=str(stack.logs),
    )
    with stack.engine(connector) as engine:
        engine.call("wait_attached")
        save_and_load(stack, engine, reference, 1200)


def test_decode_blocks_are_saved(stack: Stack, reference: EngineProcess) -> None:
    words = prompt(1300, 40)
    with stack.engine(stack.connector(save_decode=True)) as engine:
        engine.call("wait_attached")
        (first,) = engine.generate([words], max_tokens=100)
        engine.forget()
        dialogue = [*words, *first["tokens"][:-1]]
        wanted = cold(reference, [dialogue])
        before = engine.call("counters")["hit_tokens"]
        got = engine.generate([dialogue])
        hit = engine.call("counters")["hit_tokens"] - before
        # All but perhaps the block that the last sampled token completed.
        assert hit >= (len(dialogue) // BLOCK - 1) * BLOCK > 40
        assert got[0]["tokens"] == wanted[0]["tokens"]


def test_roles(stack: Stack, reference: EngineProcess) -> None:
    words = prompt(1400, 500)
    wanted = cold(reference, [words])
    with stack.engine(stack.connector(role="kv_consumer")) as consumer:
        consumer.call("wait_attached")
        assert_same(consumer.generate([words]), wanted)
        consumer.forget()
        with stack.engine(stack.connector(role="kv_producer")) as producer:
            producer.call("wait_attached")
            assert_same(producer.generate([words]), wanted)
            producer.forget()
            assert_same(producer.generate([words]), wanted)
            producer.settle()
            assert producer.call("counters")["hit_tokens"] == 0
        # Saved by the other engine, loaded by this one, which itself has saved nothing.
        assert consumer.call("counters")["hit_tokens"] == 0
        assert_same(consumer.generate([words]), wanted)
        assert consumer.call("counters")["hit_tokens"] == 500 // BLOCK * BLOCK


def test_two_engines_share_one_daemon(stack: Stack, reference: EngineProcess) -> None:
    words = prompt(1500, 600)
    wanted = cold(reference, [words])
    with stack.engine() as one, stack.engine() as two:
        one.call("wait_attached")
        two.call("wait_attached")
        assert_same(one.generate([words]), wanted)
        one.settle()
        assert_same(two.generate([words]), wanted)
        assert two.call("counters")["hit_tokens"] == 600 // BLOCK * BLOCK
        # And the first is undisturbed.
        assert_same(one.generate([words]), wanted)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"block_size": 64}, r"block_sizes", id="another block size"),
        pytest.param({"dtype": "bfloat16"}, r"dtype", id="another dtype"),
    ],
)
def test_another_identity_finds_nothing(stack: Stack, options: dict[str, Any], said: str) -> None:
    words = prompt(1600, 600)
    with stack.engine() as one:
        one.call("wait_attached")
        one.generate([words])
        one.settle()
    with stack.engine(**options) as two:
        two.call("wait_attached")
        two.generate([words])
        two.settle()
        assert two.call("counters")["hit_tokens"] == 0
        log = two.log.read_text("utf-8", errors="replace")
    assert re.search(rf"cannot be used by this engine: .*{said}", log), log[-3000:]


def test_another_model_finds_nothing(stack: Stack, tmp_path: Path) -> None:
    words = prompt(1650, 600)
    with stack.engine() as one:
        one.call("wait_attached")
        one.generate([words])
        one.settle()
    other = make_model(tmp_path / "other", ModelSpec(seed=1))
    with stack.engine(model=other) as two:
        two.call("wait_attached")
        two.generate([words])
        two.settle()
        assert two.call("counters")["hit_tokens"] == 0
        log = two.log.read_text("utf-8", errors="replace")
    assert re.search(r"cannot be used by this engine: .*model", log), log[-3000:]


def test_the_engine_core_in_a_process_of_its_own(stack: Stack, reference: EngineProcess) -> None:
    words = prompt(1700, 810)
    wanted = cold(reference, [words])
    with stack.engine() as first:
        first.call("wait_attached")
        first.generate([words])
        first.settle()
    with stack.engine(in_process=False) as engine:
        got = engine.generate([prompt(1701, 40)])
        assert_same(got, cold(reference, [prompt(1701, 40)]))
        got = engine.generate([words])
        assert_same(got, wanted)
        assert got[0]["cached"] == 810 // BLOCK * BLOCK


def test_whole_objects_into_the_daemons_own_segment(
    model: Path, master: LocalMaster, reference: EngineProcess, tmp_path: Path
) -> None:
    with Stack(tmp_path, model, mooncake_file(tmp_path, master.address), save="auto") as stack:
        with stack.engine(stack.connector(label="whole")) as engine:
            engine.call("wait_attached")
            save_and_load(stack, engine, reference, 1800)
        writes = [
            command
            for path in stack.logs.glob("kvworker-*.kvlog")
            for record in read_log(path)
            for command in worker_commands.decode(record.commands)
            if isinstance(command, WriteLayers)
        ]
    assert writes
    assert all(command.whole for command in writes)
