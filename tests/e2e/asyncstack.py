"""vLLM's ``AsyncScheduler`` driven by hand: two steps in flight, a real daemon, a pretended model.

The CPU build of vLLM turns async scheduling off, so the scheduler is built here as an engine core
with it would build it. A step is planned, and only later "runs" and comes back, after the next one
has been planned.

The model writes what a model writes: bytes that follow from all tokens up to there, and, as a real
one would, wrong bytes wherever it reads a block that does not hold what it should.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from kvsched.core.commands import ModelLoad, TellModel
from kvsched.metadata import RankInfo, StepMetadata, StepReport, read_step_metadata
from kvsched.plugin import register
from tests.support.client import Client
from tests.support.daemonproc import DaemonProcess, daemon
from tests.support.fakemodel import FINGERPRINT, NUM_BLOCKS, NUM_LAYERS, FakeModel

BLOCK = 16
TOKEN = 7


def content(tokens: Sequence[int], *, wrong: bool = False) -> bytes:
    """What a block holds after the last of these tokens, the first ones being in those before."""
    digest = hashlib.sha256(f"{list(tokens)} {wrong}".encode()).digest()
    return (digest * 128)[: NUM_LAYERS * 2 * 512]


class Stack:
    """A scheduler with our connector, a daemon, and a model side that runs a step when told."""

    def __init__(self, scheduler: AsyncScheduler, running: DaemonProcess, engine: str) -> None:
        self.scheduler = scheduler
        self.daemon = running
        self.model = FakeModel()
        self.control = Client(running.endpoint, "model", engine=engine, epoch=5)
        self.data = Client(running.endpoint, "data", engine=engine, epoch=5)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        #: Asynchronous loads that have not been reported: job → load.
        self.waiting: dict[int, ModelLoad] = {}
        self.requests: dict[str, Request] = {}
        #: Requests that computed on a block with wrong bytes.
        self.wrong: list[str] = []
        #: Each request's blocks, as the model has been told.
        self.tables: dict[str, list[int]] = {}
        #: By planned step: which requests get a token from it.
        self._samples: dict[int, frozenset[str]] = {}

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

    def acknowledged(self) -> bool:
        """The daemon has taken in every plan."""
        return not self.connector.scheduler._core._state.ranks.get(0).acks

    def add(self, name: str, num_tokens: int, max_tokens: int, first: int = 0) -> Request:
        """Add a request; those of another ``first`` token share no block."""
        request = Request(
            name,
            list(range(first, first + num_tokens)),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            block_hasher=self.hasher,
        )
        request.sampling_params.update_from_generation_config({}, None)
        self.scheduler.add_request(request)
        self.requests[name] = request
        return request

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        starts = self._starts(output)
        self._samples[id(output)] = frozenset(
            name
            for name, count in output.num_scheduled_tokens.items()
            if starts[name] + count >= self.requests[name].num_tokens
        )
        return output

    @staticmethod
    def _starts(output: Any) -> dict[str, int]:
        """How much of each scheduled request was computed before."""
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update({new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs})
        return starts

    def run(
        self, output: Any, *, tell_end: bool = True, give_up: bool = False
    ) -> ModelRunnerOutput:
        """The model process runs a step that was planned earlier.

        Args:
            output: The step.
            tell_end: Wait until every asynchronous load has ended, and report them.
            give_up: Report them as failed instead, as the model side does without its daemon.
        """
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
                self.waiting[load.job_id] = load
            if tell.loads or tell.saves:
                self.data.say(StepBegun(step=tell.step))
        self.compute(output)
        if tell is not None and tell.saves:
            self.data.say(LayersComputed(step=tell.step, num_layers=NUM_LAYERS))
        while self.waiting and (tell_end or give_up):
            if give_up:
                load = self.waiting.popitem()[1]
                done.add(load.request_id)
                invalid |= set(load.block_ids)
                continue
            for end in self.data.hear(JobsEnded).ends:
                done.add(self.waiting.pop(end.job_id).request_id)
                invalid |= set(end.failed_blocks)
        names = list(output.num_scheduled_tokens)
        samples = self._samples.pop(id(output))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[TOKEN] if name in samples else [] for name in names],
            kv_connector_output=KVConnectorOutput(
                finished_recving=done or None,
                invalid_block_ids=invalid,
                kv_connector_worker_meta=StepReport(metadata.step),
            ),
        )

    def compute(self, output: Any) -> None:
        """The forward pass of a step."""
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = []
            self.tables[name] += more[0] if more else []
        starts = self._starts(output)
        for name, count in output.num_scheduled_tokens.items():
            self._compute_request(name, starts[name], starts[name] + count)

    def _compute_request(self, name: str, start: int, end: int) -> None:
        table, request = self.tables[name], self.requests[name]
        tokens = [*request.prompt_token_ids, *[TOKEN] * end][:end]
        reads = [*range(BLOCK, start, BLOCK), start] if start else []
        wrong = any(
            self.model.block(table[(stop - 1) // BLOCK]) != content(tokens[:stop]) for stop in reads
        )
        if wrong:
            self.wrong.append(name)
        for index in range(start // BLOCK, -(-end // BLOCK)):
            upto = tokens[: (index + 1) * BLOCK]
            self.model.write(table[index], content(upto, wrong=wrong))

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

    def expected(self) -> dict[bytes, bytes]:
        """What the objects of all requests so far must hold, by block hash."""
        right = {}
        for request in self.requests.values():
            tokens = list(request.all_token_ids)
            for index, name in enumerate(request.block_hashes):
                right[bytes(name)] = content(tokens[: (index + 1) * BLOCK])
        return right

    def blocks_being_saved(self) -> list[int]:
        """Blocks of saves that have not ended."""
        jobs = self.connector.scheduler._core._state.ledger
        return [block for job in jobs if job.is_save for block in job.block_ids]

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
    model: Path,
    tmp_path: Path,
    *rules: dict[str, Any],
    policy: str = "recompute",
    max_num_batched_tokens: int = 128,
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
            max_num_batched_tokens=max_num_batched_tokens,
            kv_transfer_config={
                "kv_connector": "KVFerryConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {
                    "validate": True,
                    "lookup_timeout_ms": 20_000,
                    # The first step that could load does.
                    "lookup_wait_ms": 20_000,
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


def store(it: Stack, num_tokens: int = 81) -> list[bytes]:
    """Compute and save a prompt once; returns what its full blocks hold, in order."""
    request = it.add("first", num_tokens, 1)
    output = it.schedule()
    it.finish(output, it.run(output))
    it.drain()
    assert request.is_finished()
    assert it.scheduler.reset_prefix_cache()
    for block in range(1, NUM_BLOCKS):
        it.model.clear(block)
    prompt = list(range(num_tokens))
    return [content(prompt[:end]) for end in range(BLOCK, num_tokens + 1, BLOCK)]
