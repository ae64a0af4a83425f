"""Times the connector's hooks inside an engine that runs in this one process.

Both halves of the connector live here: the scheduler's and the model side's. The hooks of the model
side are called in a loop with the metadata of a real step in which there was nothing to do.
``build_connector_meta`` is timed where it is called, step by step, in real schedules: prefill steps
(each has a new prompt to save) and decode steps of a given number of running requests; and the
decode steps' own ``SchedulerOutput`` is then given again in a loop, where nothing else disturbs.
"""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.prompts import random_prompt

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput

#: Calls per timing, and timings of which the median is taken.
LOOPS = 2000
REPEATS = 7
#: Decode steps that are watched for each number of running requests.
DECODE_STEPS = 24
PREFILLS = 12


def measure(llm: "LLM", order: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Time every hook.

    Args:
        llm: An in-process engine.
        order: ``running``: numbers of running requests; ``seed``: of the prompts; ``num_tokens``
            of a prefill.
        vocabulary: Number of tokens.

    Returns:
        ``hooks``: hook → µs per call with nothing to do; ``decode``: number of running requests →
        µs of ``build_connector_meta`` (``watched`` in the schedule, ``looped``); ``prefill``: µs.
    """
    probe = _Probe(llm, vocabulary, order["seed"])
    result: dict[str, Any] = {"prefill": probe.prefill(order["num_tokens"]), "decode": {}}
    for count in order["running"]:
        result["decode"][str(count)] = probe.decode(count)
    result["hooks"] = probe.model_side()
    return result


class _Probe:
    """Drives the engine and watches ``build_connector_meta``."""

    def __init__(self, llm: "LLM", vocabulary: int, seed: int) -> None:
        from vllm import SamplingParams
        from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

        self._engine = llm.llm_engine
        self._params = SamplingParams
        self._vocabulary = vocabulary
        self._seed = seed * 100_000
        self._scheduler_side = self._engine.engine_core.engine_core.scheduler.connector
        self._model_side = get_kv_transfer_group()
        self._build = self._scheduler_side.build_connector_meta
        self._scheduler_side.build_connector_meta = self._watched
        self._watching: list[float] = []
        self._last: tuple[Any, Any] | None = None

    def _watched(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        started = time.perf_counter_ns()
        metadata = self._build(scheduler_output)
        self._watching.append((time.perf_counter_ns() - started) / 1000)
        if scheduler_output.total_num_scheduled_tokens:
            self._last = (scheduler_output, metadata)
        return metadata

    def _add(self, num_tokens: int, max_tokens: int) -> None:
        self._seed += 1
        tokens = random_prompt(self._seed, num_tokens, self._vocabulary)
        params = self._params(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        name = f"hook-{self._seed}"
        self._engine.add_request(name, {"prompt_token_ids": tokens}, params)

    def _drain(self) -> None:
        """Step until nothing runs and nothing is held."""
        deadline = time.monotonic() + 60
        while self._engine.has_unfinished_requests():
            self._engine.step()
        while self._scheduler_side.has_pending_push_work() and time.monotonic() < deadline:
            self._engine.step()
            time.sleep(0.001)

    def prefill(self, num_tokens: int) -> dict[str, float]:
        """Time the first step of new prompts, each to be looked up and saved."""
        found = []
        for _ in range(PREFILLS):
            self._add(num_tokens, 1)
            # The connector may ask for another step before it has an answer.
            while True:
                self._watching.clear()
                self._engine.step()
                if self._last is not None and self._last[0].total_num_scheduled_tokens > 1:
                    break
            found.append(self._watching[-1])
            self._last = None
            self._drain()
        return _spread(found)

    def decode(self, count: int) -> dict[str, Any]:
        """Time steps in which ``count`` requests decode, short prompts that fill no block."""
        for _ in range(count):
            self._add(16, DECODE_STEPS + 24)
        while True:
            self._engine.step()
            if self._last is not None:
                output = self._last[0]
                running = len(output.scheduled_cached_reqs.req_ids)
                if running == count == output.total_num_scheduled_tokens:
                    break
        self._watching.clear()
        for _ in range(DECODE_STEPS):
            self._engine.step()
        watched = _spread(self._watching)
        assert self._last is not None
        output = self._last[0]
        looped = _loop(lambda: self._build(output), LOOPS // 10)
        self._drain()
        return {"watched": watched, "looped": looped}

    def model_side(self) -> dict[str, dict[str, float]]:
        """Time the model side's hooks in a step that has nothing to load or save."""
        from vllm.forward_context import ForwardContext

        self._add(16, 4)
        self._engine.step()
        self._engine.step()
        assert self._last is not None
        metadata, side = self._last[1], self._model_side
        context = ForwardContext.__new__(ForwardContext)
        layer = "model.layers.3.self_attn.attn"

        def bind_and_clear() -> None:
            side.bind_connector_metadata(metadata)
            side.clear_connector_metadata()

        hooks: dict[str, Callable[[], object]] = {"bind + clear": bind_and_clear}
        side.bind_connector_metadata(metadata)
        hooks |= {
            "start_load_kv": lambda: side.start_load_kv(context),
            "wait_for_layer_load": lambda: side.wait_for_layer_load(layer),
            "save_kv_layer": lambda: side.save_kv_layer(layer, None, None),
            "wait_for_save": side.wait_for_save,
            "get_transfer_results": lambda: side.get_transfer_results(set()),
            "get_block_ids_with_load_errors": side.get_block_ids_with_load_errors,
            "get_kv_connector_stats": side.get_kv_connector_stats,
            "build_connector_worker_meta": side.build_connector_worker_meta,
        }
        found = {}
        for name, hook in hooks.items():
            if name != "bind + clear":
                side.bind_connector_metadata(metadata)
            found[name] = _loop(hook, LOOPS)
        side.clear_connector_metadata()
        self._drain()
        return found


def _loop(call: Callable[[], object], loops: int) -> dict[str, float]:
    """Return µs per call."""
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter_ns()
        for _ in range(loops):
            call()
        found.append((time.perf_counter_ns() - started) / 1000 / loops)
    return _spread(found)


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "count": len(values),
    }
