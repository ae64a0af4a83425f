"""The engine of chaos: ``engine_main`` with a mixed load that measures itself."""

import ctypes
import gc
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.chaos import measure
from tests.e2e import engine_main

GIVE_UP_S = 150.0
QUIET_S = 60.0
HITS = "vllm:external_prefix_cache_hits"


class ChaosEngine(engine_main.Engine):
    """An engine that is stepped by hand."""

    def measure(self) -> None:
        """Measure in every process that can be reached: not in a core of its own."""
        measure.install()
        self.llm.collective_rpc(measure.install)

    def mixed(
        self, prompts: list[list[int]], max_tokens: int, aborted: list[int], prefix: str
    ) -> dict[str, Any]:
        """Serve all prompts at once, abort some on the way; tokens, hung requests, long steps."""
        engine = self.llm.llm_engine
        names = self._add(prompts, max_tokens, prefix)
        tokens: dict[str, list[int]] = {}
        spans = measure.Spans()
        started, steps = time.monotonic(), 0
        while engine.has_unfinished_requests() and time.monotonic() - started < GIVE_UP_S:
            before = measure.now()
            for output in self._step():
                if output.finished and output.outputs[0].finish_reason == "length":
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
            spans.add("step", before)
            steps += 1
            if steps == 3 + len(prompts) and aborted:
                engine.abort_request([names[index] for index in aborted])
        hung = len(names) - len(tokens) if engine.has_unfinished_requests() else 0
        return {
            "tokens": [tokens.get(each) for each in names],
            "hung": hung,
            "seconds": time.monotonic() - started,
            "steps": spans.take(),
        }

    def measured(self) -> dict[str, Any]:
        """What this process and the workers have measured since the last call."""
        parts = [measure.taken(), *self.llm.collective_rpc(measure.taken)]
        return {
            "hooks": [span for part in parts for span in part["hooks"]],
            "preempted": sum(part["preempted"] for part in parts),
            "chunked": sum(part["chunked"] for part in parts),
        }

    def quiet(self) -> int:
        """Wait until the connector has nothing open; blocks that are not free then.

        A core in a process of its own only says whether all are free: its reset succeeds then.
        """
        if self.core is not None:
            free: int = self.settle()["free"]
            return int(self.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1 - free
        deadline = time.monotonic() + QUIET_S
        while not self.reset():
            if time.monotonic() > deadline:
                return 1
            time.sleep(0.05)
        return 0

    def trim(self) -> None:
        """Give back memory that is free, so that what is still there is in use."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def hits(self) -> float:
        """Tokens that have come from the store so far."""
        found: float = sum(
            getattr(metric, "value", 0.0)
            for metric in self.llm.get_metrics()
            if metric.name.startswith(HITS)
        )
        return found

    def _add(self, prompts: list[list[int]], max_tokens: int, prefix: str) -> list[str]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        names = [f"{prefix}-{index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return names

    def _step(self) -> list[Any]:
        """One step; an error if the core has been killed.

        vLLM's synchronous client waits for ever for outputs of a core that was killed by SIGKILL
        (seen with 0.32, without any connector); its servers use the asynchronous one, which does
        not. So here it is asked whether it has noticed.
        """
        client: Any = self.llm.llm_engine.engine_core
        if self.core is None:
            while client.outputs_queue.empty():
                if client.resources.engine_dead:
                    raise ConnectionError("the engine core is dead")
                time.sleep(0.0005)
        return list(self.llm.llm_engine.step())


if __name__ == "__main__":
    engine_main.Engine = ChaosEngine  # type: ignore[misc]
    engine_main.main()
