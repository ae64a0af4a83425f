"""One vLLM engine that takes orders from a pipe: the child process of a benchmark.

Started as ``engine_child.py READ_FD WRITE_FD``; speaks JSON lines. The first order configures the
engine, every further one is an ``op``; each is answered by one line. With ``multi`` the engine
core and its worker are processes of their own, as in production; without, everything runs here.
"""

import json
import os
import sys
import time
from typing import Any, TextIO

from benchmarks import hook_timing
from benchmarks.prompts import random_prompt

#: Retrying a reset of the prefix cache: blocks that are being saved are held for a moment.
RESET_S = 30.0


class Child:
    """The engine and the operations on it."""

    def __init__(self, config: dict[str, Any]) -> None:
        # Read by vLLM when it is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if config["multi"] else "0"
        from vllm import LLM, SamplingParams

        arguments: dict[str, Any] = {
            "model": config["model"],
            # vLLM's own choice for a float32 model is bfloat16, too coarse to compare answers.
            "dtype": "float32",
            "max_model_len": config["max_model_len"],
            "max_num_batched_tokens": config["max_batched_tokens"],
            "max_num_seqs": config.get("max_num_seqs", 256),
            "enforce_eager": True,
            "seed": 0,
            "disable_log_stats": True,
        }
        if config["kv_transfer"]:
            arguments["kv_transfer_config"] = config["kv_transfer"]
        self.llm = LLM(**arguments)
        self._sampling = SamplingParams
        self._vocabulary: int = config["vocabulary"]

    def generate(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run one random prompt to its first token and time it."""
        tokens = random_prompt(order["seed"], order["num_tokens"], self._vocabulary)
        params = self._sampling(temperature=0, max_tokens=order.get("max_tokens", 1), logprobs=0)
        started = time.perf_counter()
        [output] = self.llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        answer = output.outputs[0]
        return {
            "seconds": seconds,
            "cached": output.num_cached_tokens or 0,
            "finish": answer.finish_reason,
            "tokens": list(answer.token_ids),
            "logprobs": [
                step[token].logprob
                for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
            ],
        }

    def reset(self, order: dict[str, Any]) -> dict[str, Any]:
        """Empty the engine's own prefix cache."""
        deadline = time.monotonic() + order.get("timeout_s", RESET_S)
        tries = 1
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                return {"error": "blocks are still held, the prefix cache cannot be reset"}
            tries += 1
            time.sleep(0.02)
        return {"tries": tries}

    def hooks(self, order: dict[str, Any]) -> dict[str, Any]:
        """Time the connector's hooks; see ``hook_timing``."""
        return hook_timing.measure(self.llm, order, self._vocabulary)


def serve(orders: TextIO, answers: TextIO) -> None:
    """Carry out orders until the pipe ends."""

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    child = Child(json.loads(orders.readline()))
    answer({"ready": True})
    operations = {"generate": child.generate, "reset": child.reset, "hooks": child.hooks}
    for line in orders:
        order = json.loads(line)
        answer(operations[order["op"]](order))


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "r") as source, os.fdopen(int(sys.argv[2]), "w") as sink:
        for end in (source, sink):
            os.set_inheritable(end.fileno(), False)
        serve(source, sink)
