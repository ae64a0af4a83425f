"""Loads under vLLM's async scheduling: gates, failures, and what is saved around them."""

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvcommon.messages import JobsEnded, LayersComputed, StepBegun
from kvsched.metadata import StepReport, read_step_metadata
from tests.e2e.asyncstack import TOKEN, Stack, stack, store
from tests.support.fakemodel import NUM_LAYERS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_nothing_is_loaded_into_a_block_before_its_gate(model: Path, tmp_path: Path) -> None:
    with stack(model, tmp_path) as it:
        free = it.free
        wanted = store(it)
        it.add("second", 81, 2)
        before = it.schedule()
        assert "second" not in before.num_scheduled_tokens
        # The plan is out, the step before it may still run: no block may change.
        metadata = before.kv_connector_metadata
        (load,) = read_step_metadata(metadata).loads
        it.until(it.acknowledged)
        it.daemon.status()
        assert all(not any(it.model.block(block)) for block in load.block_ids)
        it.finish(before, it.run(before))
        assert [it.model.block(block) for block in load.block_ids] == wanted
        it.drain()
        assert it.free == free
        assert not it.wrong


def test_a_failed_load_recovers_and_nothing_poisoned_is_saved(model: Path, tmp_path: Path) -> None:
    rule = {"call": "get_start", "what": "fail", "outcome": "miss", "times": 1}
    with stack(model, tmp_path, rule) as it:
        free = it.free
        store(it)
        published = it.daemon.status().metrics.get("kvferry_puts_ended_total", 0)
        request = it.add("second", 81, 3)
        it.drain()
        assert request.is_finished()
        assert list(request.output_token_ids) == [TOKEN] * 3
        assert request.num_output_placeholders == 0
        counters = it.connector.scheduler.counters
        assert counters["requests_barred"] == 1
        assert it.free == free
        assert not it.wrong
        # What it computed anew is stored already; nothing else went out.
        assert it.daemon.status().metrics.get("kvferry_puts_ended_total", 0) == published


def test_the_policy_fail_ends_the_request_cleanly(model: Path, tmp_path: Path) -> None:
    rule = {"call": "get_start", "what": "fail", "outcome": "miss", "times": 1}
    with stack(model, tmp_path, rule, policy="fail") as it:
        free = it.free
        store(it)
        it.add("second", 81, 3)
        flying = [it.schedule(), it.schedule()]
        for output in flying:
            metadata = output.kv_connector_metadata
            tell = read_step_metadata(metadata) if metadata.payload else None
            failing = [load for load in tell.loads if load.layerwise] if tell else []
            result = _run_layerwise(it, output, failing)
            it.finish(output, result)
        it.drain()
        assert it.free == free
        assert not it.pending


def _run_layerwise(it: Stack, output: Any, failing: list[Any]) -> ModelRunnerOutput:
    """As ``run``; layerwise loads (legal under the policy ``fail``) report their blocks."""
    if not failing:
        return it.run(output)
    tell = read_step_metadata(output.kv_connector_metadata)
    it.data.say(StepBegun(step=tell.step))
    it.compute(output)
    it.data.say(LayersComputed(step=tell.step, num_layers=NUM_LAYERS))
    invalid: set[int] = set()
    for end in it.data.hear(JobsEnded).ends:
        invalid |= set(end.failed_blocks)
    assert invalid
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[TOKEN] for _ in names],
        kv_connector_output=KVConnectorOutput(
            invalid_block_ids=invalid, kv_connector_worker_meta=StepReport(tell.step)
        ),
    )
