"""An engine of chaos, as its parent sees it."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.engines import EngineError, EngineProcess

CHILD = Path(__file__).with_name("engine_child.py")
#: How long the processes of an engine may take to end after one of them has died. vLLM itself
#: waits for its workers for several seconds, and kills them then.
END_S = 30.0
OPTIONS: dict[str, Any] = {
    "num_gpu_blocks_override": 48,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 6,
}

#: oneDNN keeps a compiled kernel for each size of a batch: 6 MB more per load, without a connector
#: too, until its cache is full. Small, it is full at once, and what else grows can be seen.
SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How an engine is run: its ranks, and whether its core has a process of its own."""

    ranks: int = 1
    in_process: bool = True

    def engine(
        self, model: Path, log: Path, scratch: Path, connector: dict[str, Any] | None
    ) -> "Victim":
        """Make an engine, not started yet; ``scratch`` is for vLLM's temporary files."""
        options: dict[str, Any] = dict(OPTIONS)
        environ = {**SMALL_CACHES, "TMPDIR": str(scratch)}
        if self.ranks > 1:
            options["tensor_parallel_size"] = self.ranks
            options["distributed_executor_backend"] = "mp"
            environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(self.ranks)))
        return Victim(
            model,
            log,
            connector=connector,
            in_process=self.in_process,
            environ=environ,
            **options,
        )


class Victim(EngineProcess):
    """One engine; a context manager. Whoever is done with it calls ``bury``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._command[1] = str(CHILD)
        self._in_process: bool = options["in_process"]
        self.core_pid = 0
        self.worker_pids: tuple[int, ...] = ()

    def __enter__(self) -> "Victim":  # noqa: PYI034 (Self needs Python 3.11)
        super().__enter__()
        named = {member.pid: member.name() for member in self.members()}
        self.worker_pids = tuple(
            sorted(pid for pid, name in named.items() if name.startswith("VLLM::Worker"))
        )
        cores = [pid for pid, name in named.items() if name.startswith("VLLM::EngineCore")]
        (self.core_pid,) = [self.pid] if self._in_process else cores
        return self

    def bury(self, patience_s: float = END_S) -> list[str]:
        """End it if it lives; return what did not end by itself. Nothing of it is left."""
        with contextlib.suppress(OSError):
            self._calls.close()
        deadline = time.monotonic() + patience_s
        while (left := self._running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        names = []
        for member in left:
            with contextlib.suppress(psutil.Error):
                names.append(f"{member.name()} ({member.status()})")
        self.kill()
        return names

    def _running(self) -> list[psutil.Process]:
        if self._process is not None:
            # Reaps it, if it has ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0)
        return self.members()


class Load(threading.Thread):
    """A call to an engine that lasts, in a thread of its own."""

    def __init__(self, engine: EngineProcess, name: str, **arguments: Any) -> None:
        super().__init__(daemon=True)
        self._engine = engine
        self._call = name
        self._arguments = arguments
        self.answer: dict[str, Any] | None = None
        self.error = ""
        self.ended_at = 0.0

    def run(self) -> None:
        """Call, and note what came of it."""
        try:
            self.answer = self._engine.call(self._call, **self._arguments)
        except (EngineError, ValueError, OSError) as error:
            self.error = str(error) or type(error).__name__
        self.ended_at = time.monotonic()


def freeze(pid: int, seconds: float) -> tuple[float, float]:
    """Stop a process for a while; between which two moments it stood."""
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        # It may have been fenced.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return began, time.monotonic()
