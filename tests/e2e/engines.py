"""The parent's half of ``engine_main.py``, and what e2e tests compare."""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from servers import ServerProcess, engine_environ, log_tail

CALL_TIMEOUT_S = 240.0
END_S = 30.0
VLLM_LEAVES = "/dev/shm/vllm_dist_"
#: Largest difference of logprobs that float32 on one machine explains.
LOGPROB_TOLERANCE = 1e-4

MAIN = Path(__file__).with_name("engine_main.py")


class EngineError(Exception):
    """The engine answered with an error, or not at all."""


class EngineProcess(ServerProcess):
    """One engine; a context manager."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        connector: dict[str, Any] | None = None,
        in_process: bool = True,
        environ: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        extra = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "PYTHONPATH": os.pathsep.join(
                str(MAIN.parents[2] / p) for p in (".", "common", "tools")
            ),
            **(environ or {}),
        }
        self._to_child, self._from_child = os.pipe(), os.pipe()
        command = [
            sys.executable,
            str(MAIN),
            str(self._to_child[0]),
            str(self._from_child[1]),
        ]
        super().__init__("engine", command, log, engine_environ(extra))
        self.config: dict[str, Any] = {
            "model": str(model),
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
            "dtype": "float32",
            "block_size": 32,
            "enable_prefix_caching": True,
            "num_gpu_blocks_override": 256,
            "disable_log_stats": False,
            "seed": 0,
            **options,
        }
        if connector is not None:
            self.config["kv_transfer_config"] = connector

    def __enter__(self) -> "EngineProcess":  # noqa: PYI034 (Self needs Python 3.11)
        self.launch(pass_fds=(self._to_child[0], self._from_child[1]))
        os.close(self._to_child[0])
        os.close(self._from_child[1])
        self._calls = os.fdopen(self._to_child[1], "w", encoding="utf-8", buffering=1)
        self._answers = os.fdopen(self._from_child[0], "r", encoding="utf-8")
        try:
            self._exchange(self.config)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.note_shm()
        self._calls.close()
        if kind is None and self._process is not None:
            # An engine that ends by itself: it shuts the connector down and leaves nothing.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        super().__exit__(kind, error, trace)
        self._answers.close()
        if kind is None:
            left = self.leftovers()
            for path in left:
                Path(path).unlink()
            # vLLM itself leaves these under tensor parallelism, with and without a connector.
            if ours := [path for path in left if not path.startswith(VLLM_LEAVES)]:
                raise EngineError(f"left behind: {ours}")

    def call(self, name: str, **arguments: Any) -> Any:
        return self._exchange({"call": name, **arguments})

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.call(
            "generate", prompts=[list(prompt) for prompt in prompts], **options
        )
        return answers

    def settle(self) -> dict[str, Any]:
        state: dict[str, Any] = self.call("settle")
        return state

    def forget(self) -> None:
        """Finish saves, then empty the local prefix cache."""
        self.settle()
        assert self.call("reset"), "blocks are still referenced"

    def _exchange(self, request: dict[str, Any]) -> Any:
        try:
            self._calls.write(json.dumps(request) + "\n")
        except OSError as error:
            raise EngineError(f"engine gone: {error}\n{log_tail(self.log)}") from None
        ready, _, _ = select.select([self._answers], [], [], CALL_TIMEOUT_S)
        line = self._answers.readline() if ready else ""
        if not line:
            raise EngineError(f"no answer to {request.get('call')}:\n{log_tail(self.log)}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{answer['error']}\n{log_tail(self.log)}")
        return answer["ok"]


def assert_same(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Tokens are equal, and logprobs of every candidate within the tolerance."""
    assert len(got) == len(wanted)
    for mine, other in zip(got, wanted, strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine["finish"] == other["finish"]
        for here, there in zip(mine["logprobs"], other["logprobs"], strict=True):
            for token in here.keys() & there.keys():
                assert abs(here[token] - there[token]) < LOGPROB_TOLERANCE, (token, here, there)
            assert len(here.keys() & there.keys()) >= 4


def differs(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> bool:
    """The negative control: ``assert_same`` would fail."""
    try:
        assert_same(got, wanted)
    except AssertionError:
        return True
    return False
