"""One vLLM engine in a process of its own, driven by JSON lines over two pipes.

``python engine_main.py READ_FD WRITE_FD``: the first line is the engine's configuration, each
further line one call ``{"call": name, ...}``; every line is answered by one line, ``{"ok": ...}``
or ``{"error": text}``. The engine core runs in this process unless the configuration says
otherwise.
"""

import hashlib
import json
import os
import sys
import time
from typing import Any

DEADLINE_S = 60.0
NAP_S = 50e-6


class Engine:
    def __init__(self, config: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**config)
        if config.get("tensor_parallel_size", 1) > 1:
            nap_instead_of_yielding()
            self.llm.collective_rpc(nap_instead_of_yielding)
        self.core: Any = getattr(self.llm.llm_engine.engine_core, "engine_core", None)

    def connector(self) -> Any:
        return self.core.scheduler.connector

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 4, together: bool = True
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=5, ignore_eos=True)
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        answers = []
        for batch in batches:
            outputs = self.llm.generate(
                [{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False
            )
            for output in outputs:
                choice = output.outputs[0]
                answers.append(
                    {
                        "tokens": list(choice.token_ids),
                        "logprobs": [
                            {str(token): entry.logprob for token, entry in position.items()}
                            for position in choice.logprobs or []
                        ],
                        "cached": output.num_cached_tokens,
                        "finish": choice.finish_reason,
                    }
                )
        return answers

    def settle(self) -> dict[str, Any]:
        """Step until nothing of the connector is pending."""
        if self.core is None:
            return {}
        deadline = time.monotonic() + DEADLINE_S
        while self.connector().has_pending_push_work():
            self.core.step_fn()
            # As vLLM's own loop does: what is waited for needs the processor too.
            time.sleep(0.001)
            if time.monotonic() > deadline:
                raise TimeoutError(f"still pending: {self.connector().scheduler.counters}")
        pool = self.core.scheduler.kv_cache_manager.block_pool
        self.connector().scheduler._log.flush()
        return {"free": pool.get_num_free_blocks()}

    def wait_attached(self, attached: bool = True) -> None:
        """Ask for lookups until every rank's daemon serves us, or until one does not."""
        shell = self.connector().scheduler
        deadline = time.monotonic() + DEADLINE_S
        while shell._core.serving is not attached:
            shell._poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no daemon has {'attached' if attached else 'gone'}")
            time.sleep(0.005)

    def reset(self) -> bool:
        return bool(self.llm.reset_prefix_cache())

    def counters(self) -> dict[str, float]:
        return {"hit_tokens": 0, **self.connector().scheduler.counters}

    def digests(self, block_ids: list[int]) -> list[list[str]]:
        """Per rank, the digest of each block over all layers."""
        return list(self.llm.collective_rpc(block_digests, args=(block_ids,)))

    def spoil(self, block_id: int) -> None:
        """Overwrite the second half of one block on every rank."""
        self.llm.collective_rpc(spoil_block, args=(block_id,))

    def pid(self) -> int:
        return os.getpid()


def nap_instead_of_yielding(_worker: Any = None) -> None:
    """Let others run, while vLLM's ranks wait for each other.

    Each on a processor of its own, they wait by ``sched_yield`` in a loop. On Linux 6.18 that was
    seen to keep all other processes from a processor for a minute, without any fault: a daemon that
    gets none is fenced, and does not even die.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = _nap


def _nap() -> None:
    time.sleep(NAP_S)


def _caches(worker: Any) -> Any:
    context = worker.model_runner.vllm_config.compilation_config.static_forward_context
    caches = {name: layer.kv_cache for name, layer in context.items() if hasattr(layer, "kv_cache")}
    return {
        name: cache[0] if isinstance(cache, (list, tuple)) else cache
        for name, cache in sorted(caches.items())
    }


def block_digests(worker: Any, block_ids: list[int]) -> list[str]:
    caches = _caches(worker)
    return [
        hashlib.sha256(
            b"".join(cache[block].contiguous().numpy().tobytes() for cache in caches.values())
        ).hexdigest()
        for block in block_ids
    ]


def spoil_block(worker: Any, block_id: int) -> None:
    for cache in _caches(worker).values():
        cache[block_id].neg_()


def main() -> None:
    read_fd, write_fd = int(sys.argv[1]), int(sys.argv[2])
    with (
        os.fdopen(read_fd, "r", encoding="utf-8") as calls,
        os.fdopen(write_fd, "w", encoding="utf-8", buffering=1) as answers,
    ):
        engine = None
        for line in calls:
            request = json.loads(line)
            try:
                if engine is None:
                    engine = Engine(request)
                    result: Any = os.getpid()
                else:
                    result = getattr(engine, request.pop("call"))(**request)
                answers.write(json.dumps({"ok": result}) + "\n")
            except Exception as error:  # noqa: BLE001 - the parent decides what it means
                import traceback

                traceback.print_exc()
                answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        if engine is not None:
            engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
