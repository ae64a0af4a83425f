"""vLLM's ``AsyncScheduler`` driven by hand: two steps in flight, a real daemon, no model.

The CPU build of vLLM turns async scheduling off, so the scheduler is built here as an engine core
with it would build it, and the model runner's outputs are made up: a step is planned, and only
later "runs" and comes back, after the next one has been planned.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvcommon.messages import Attached, JobsEnded, LayersComputed, StepBegun
from kvsched.connector import KVFerryConnector
from kvsched.core.commands import TellModel
from kvsched.metadata import RankInfo, StepMetadata, StepReport, read_step_metadata
from kvsched.plugin import register
from tests.support.client import Client
from tests.support.daemonproc import DaemonProcess, daemon
from tests.support.fakemodel import FINGERPRINT, NUM_BLOCKS, NUM_LAYERS, FakeModel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BLOCK = 16
TOKEN = 7


class Stack:
    """A scheduler with our connector, a daemon, and a model side that runs a step when told."""

    def __init__(self, scheduler: AsyncScheduler, running: DaemonProcess, engine: str) -> None:
        self.scheduler = scheduler
        self.daemon = running
        self.model = FakeModel()
        self.control = Client(running.endpoint, "model", engine=engine, epoch=5)
        self.data = Client(running.endpoint, "data", engine=engine, epoch=5)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.ends: dict[int, Any] = {}
        self.waiting: dict[int, str] = {}

    @property
    def connector(self) -> KVFerryConnector:
        return self.scheduler.connector  # type: ignore[no-any-return]

    def start(self) -> None:
        info = RankInfo(
            rank=0,
            endpoint=self.daemon.endpoint,
            device="cpu:0",
            fingerprint=FINGERPRINT,
            object_bytes=1,
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
        )
        self.control.say(self.model.attach())
        self.control.hear(Attached)
        self.connector.scheduler.ranks_known([info])
        self.until(lambda: self.connector.scheduler._core.serving)

    def until(self, true: Callable[[], bool]) -> None:
        """Poll the connector, as its hooks would, until something is so."""
        for _ in range(3000):
            self.connector.scheduler._poll()
            if true():
                return
            self.connector.scheduler._ranks.wait(0, 10)  # type: ignore[union-attr]
        raise AssertionError("it never is")

    def add(self, name: str, num_tokens: int, max_tokens: int) -> Request:
        request = Request(
            name,
            list(range(num_tokens)),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            block_hasher=self.hasher,
        )
        request.sampling_params.update_from_generation_config({}, None)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Any:
        return self.scheduler.schedule()

    def run(self, output: Any, *, tell_end: bool = True) -> ModelRunnerOutput:
        """The model process runs a step that was planned earlier."""
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        tell: TellModel | None = read_step_metadata(metadata) if metadata.payload else None
        done: set[str] = set()
        invalid: set[int] = set()
        if tell is not None:
            for load in tell.loads:
                assert not load.layerwise, (
                    "a load within a step may fail: not under async scheduling"
                )
                self.waiting[load.job_id] = load.request_id
            if tell.loads or tell.saves:
                self.data.say(StepBegun(step=tell.step))
            if tell.saves:
                self.data.say(LayersComputed(step=tell.step, num_layers=NUM_LAYERS))
        if tell_end:
            while self.waiting:
                for end in self.data.hear(JobsEnded).ends:
                    done.add(self.waiting.pop(end.job_id))
                    invalid |= set(end.failed_blocks)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[TOKEN] if self._samples(output, name) else [] for name in names],
            kv_connector_output=KVConnectorOutput(
                finished_recving=done or None,
                invalid_block_ids=invalid,
                kv_connector_worker_meta=StepReport(metadata.step),
            ),
        )

    def _samples(self, output: Any, name: str) -> bool:
        for new in output.scheduled_new_reqs:
            if new.req_id == name:
                end = new.num_computed_tokens + output.num_scheduled_tokens[name]
                return bool(end >= len(new.prompt_token_ids))
        return True

    def finish(self, output: Any, result: ModelRunnerOutput) -> None:
        self.scheduler.update_from_output(output, result)

    def drain(self) -> None:
        """Two steps in flight, until nothing is left to do."""
        flying: list[Any] = []
        for _ in range(400):
            busy = self.scheduler.has_unfinished_requests() or self.pending
            if not busy and not flying:
                return
            while busy and len(flying) < 2:
                flying.append(self.schedule())
            output = flying.pop(0)
            self.finish(output, self.run(output))
            if not output.num_scheduled_tokens:
                self.connector.scheduler._ranks.wait(0, 20)  # type: ignore[union-attr]
        raise AssertionError("it never comes to rest")

    @property
    def pending(self) -> bool:
        return self.connector.has_pending_push_work()

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        self.connector.shutdown()
        self.data.close()
        self.control.close()
        self.model.close()


@contextmanager
def stack(
    model: Path, tmp_path: Path, *rules: dict[str, Any], policy: str = "recompute"
) -> Iterator[Stack]:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"store": rules}))
    register()
    init_none_hash(sha256)
    with daemon("--inject", str(plan)) as running:
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            block_size=BLOCK,
            max_model_len=200,
            enforce_eager=True,
            max_num_batched_tokens=128,
            kv_transfer_config={
                "kv_connector": "KVFerryConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {
                    "validate": True,
                    "lookup_timeout_ms": 20_000,
                    "max_held_fraction": 1.0,
                },
            },
        ).create_engine_config()
        config.scheduler_config.async_scheduling = True
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec)],
        )
        scheduler = AsyncScheduler(
            config, cache, StructuredOutputManager(config), block_size=BLOCK, log_stats=False
        )
        made = Stack(scheduler, running, config.kv_transfer_config.engine_id)
        try:
            made.start()
            yield made
        finally:
            made.close()


def store(it: Stack, num_tokens: int = 81) -> dict[int, bytes]:
    """Compute and save a prompt once; returns the bytes of its blocks in order."""
    contents = {block: it.model.fill(block, seed=block) for block in range(1, NUM_BLOCKS)}
    request = it.add("first", num_tokens, 1)
    output = it.schedule()
    (new,) = output.scheduled_new_reqs
    blocks = list(new.block_ids[0])
    it.finish(output, it.run(output))
    it.drain()
    assert request.is_finished()
    assert it.scheduler.reset_prefix_cache()
    return {index: contents[block] for index, block in enumerate(blocks[: num_tokens // BLOCK])}


def test_nothing_is_loaded_into_a_block_before_its_gate(model: Path, tmp_path: Path) -> None:
    with stack(model, tmp_path) as it:
        free = it.free
        wanted = store(it)
        for block in range(1, NUM_BLOCKS):
            it.model.clear(block)
        it.add("second", 81, 2)
        before = it.schedule()
        assert "second" not in before.num_scheduled_tokens
        # The plan is out, the step before it may still run: no block may change.
        metadata = before.kv_connector_metadata
        (load,) = read_step_metadata(metadata).loads
        acks = it.connector.scheduler._core._state.ranks.get(0).acks
        it.until(lambda: not acks or not it.connector.scheduler._core._state.ranks.get(0).acks)
        it.daemon.status()
        assert all(not any(it.model.block(block)) for block in load.block_ids)
        it.finish(before, it.run(before))
        assert [it.model.block(block) for block in load.block_ids] == list(wanted.values())
        it.drain()
        assert it.free == free


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
