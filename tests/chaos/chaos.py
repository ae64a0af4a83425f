"""Chaos: real vLLM, real Mooncake, real daemons, a mixed load, and processes that die or freeze.

    python -m tests.chaos.chaos --moments 20 --seed 1

After each moment every request that the engine kept has the tokens of an undisturbed run, none
hangs, every block is free again, nothing stays open in the daemon, and no step took longer than the
configured waits. Prints one table; exits with 1 if anything is wrong.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvworker.ask import ask_status
from localmaster import LocalMaster
from tests.chaos.faults import ENGINE_KINDS, KINDS, Surroundings, report
from tests.e2e.engines import EngineError, EngineProcess
from tests.e2e.stack import Stack, mooncake_file, prompt
from tinymodel import make_model

CHILD = Path(__file__).with_name("engine_child.py")
LOAD_TIMEOUT_MS, FENCE_TIMEOUT_MS = 3000, 4000
#: A step's own computing on a busy machine, beside its one wait for loads.
COMPUTE_S = 4.0
BUDGET_S = LOAD_TIMEOUT_MS / 1e3 + COMPUTE_S
MAX_TOKENS = 24
OPTIONS: dict[str, Any] = {
    "num_gpu_blocks_override": 48,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 6,
}
PATIENCE_S = 60.0


class Chaos:
    """One stack, one engine at a time, and a count of everything that went wrong."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.model = make_model(folder / "model")
        self.rows: dict[str, dict[str, Any]] = {}
        self.problems: list[str] = []
        heads = [prompt(1 + head, 320) for head in range(3)]
        self.prompts = [
            heads[number % 3][: 320 - 32 * (number % 2)] + prompt(50 + number, 40 + 37 * number)
            for number in range(9)
        ]
        self.wanted: list[list[int]] = []
        self._count = 0

    @contextlib.contextmanager
    def engine(self, stack: Stack, *, in_process: bool) -> Iterator[EngineProcess]:
        connector = stack.connector(
            lookup_timeout_ms=500,
            load_timeout_ms=LOAD_TIMEOUT_MS,
            fence_timeout_ms=FENCE_TIMEOUT_MS,
        )
        self._count += 1
        engine = EngineProcess(
            self.model,
            self.folder / f"chaos-{self._count}.log",
            connector=connector,
            in_process=in_process,
            **OPTIONS,
        )
        engine._command[1] = str(CHILD)
        with engine:
            yield engine

    def learn(self) -> None:
        """What an undisturbed engine without any cache answers."""
        log = self.folder / "reference.log"
        with EngineProcess(self.model, log, **OPTIONS) as reference:
            answers = reference.generate(self.prompts, max_tokens=MAX_TOKENS, together=False)
            self.wanted = [answer["tokens"] for answer in answers]

    def run(self, moments: int, kinds: list[str]) -> None:
        self.learn()
        with LocalMaster("--default_kv_lease_ttl=5000") as master:
            stack = Stack(self.folder, self.model, mooncake_file(self.folder, master.address))
            around = Surroundings(stack, master, self.rng)
            try:
                plain = [kind for kind in kinds if kind in KINDS] * moments
                self.rng.shuffle(plain)
                with self.engine(stack, in_process=True) as engine:
                    self._serve(engine, around, plain)
                for kind in kinds:
                    for _ in range(moments if kind in ENGINE_KINDS else 0):
                        self._kill_engine(stack, around, kind)
            finally:
                around.close()
        left = [path.name for path in stack.run_dir.iterdir() if path.suffix != ".lock"]
        if left:
            self.problems.append(f"left in the run directory: {left}")

    def _serve(self, engine: EngineProcess, around: Surroundings, kinds: list[str]) -> None:
        engine.call("wait_attached")
        engine.call("mixed", prompts=self.prompts, max_tokens=2, aborted=[], prefix="warm")
        free = engine.settle()["free"]
        for number, kind in enumerate(kinds):
            self._moment(engine, around, kind, number, free)
            around.heal()

    def _moment(
        self, engine: EngineProcess, around: Surroundings, kind: str, number: int, free: int
    ) -> None:
        if number % 2 == 0:
            # With an empty local cache everything is loaded, not only what was evicted.
            engine.call("reset")
        chosen = [self.rng.randrange(len(self.prompts)) for _ in range(12)]
        aborted = [self.rng.randrange(len(chosen))]
        answer: dict[str, Any] = {}

        def load() -> None:
            answer.update(
                engine.call(
                    "mixed",
                    prompts=[self.prompts[index] for index in chosen],
                    max_tokens=MAX_TOKENS,
                    aborted=aborted,
                    prefix=f"m{number}",
                )
            )

        thread = threading.Thread(target=load)
        thread.start()
        time.sleep(self.rng.uniform(0.0, 1.0))
        KINDS[kind](around)
        thread.join()
        row = self._row(kind)
        row["moments"] += 1
        row["requests"] += len(chosen)
        if not answer:
            self.problems.append(f"{kind}, moment {number}: the engine died")
            raise EngineError(f"the engine died: {engine.log}")
        for position, index in enumerate(chosen):
            tokens = answer["tokens"][position]
            if tokens is None and position not in aborted and not answer["hung"]:
                self.problems.append(f"{kind}, moment {number}: a request has no answer")
            elif tokens is not None and tokens != self.wanted[index]:
                row["wrong"] += 1
        row["hung"] += answer["hung"]
        row["worst_s"] = max(row["worst_s"], answer["worst_s"])
        row["seconds"] += answer["seconds"]
        around.heal()
        row["leaked"] += free - engine.settle()["free"]
        self._check_daemon(around, f"{kind}, moment {number}")

    def _row(self, kind: str) -> dict[str, Any]:
        new = {"moments": 0, "requests": 0, "wrong": 0, "leaked": 0, "hung": 0}
        return self.rows.setdefault(kind, {**new, "worst_s": 0.0, "seconds": 0.0})

    def _check_daemon(self, around: Surroundings, where: str) -> None:
        """Nothing stays open once all is quiet."""
        deadline = time.monotonic() + PATIENCE_S
        names = [f"kvferry_{what}_open" for what in ("jobs", "lookups", "puts", "gets")]
        while True:
            metrics = ask_status(f"ipc://{around.daemon.socket_path}", PATIENCE_S).metrics
            left = {name: metrics[name] for name in names if metrics[name]}
            if not left:
                return
            if time.monotonic() > deadline:
                self.problems.append(f"{where}: left open: {left}")
                return
            time.sleep(0.1)

    def _kill_engine(self, stack: Stack, around: Surroundings, kind: str) -> None:
        """The engine (or its core process) dies under load; its daemon lets go of it."""
        row = self._row(kind)
        with contextlib.suppress(EngineError), self.engine(
            stack, in_process=kind == "engine kill -9"
        ) as engine:
            thread = threading.Thread(target=self._serve_until_killed, args=(engine,))
            victims = [one.pid for one in engine.members()]
            victim = engine.pid if kind == "engine kill -9" else max(victims)
            thread.start()
            time.sleep(self.rng.uniform(0.5, 2.0))
            os.kill(victim, signal.SIGKILL)
            engine.kill()
            thread.join()
            raise EngineError("killed as planned")
        row["moments"] += 1
        row["requests"] += len(self.prompts)
        deadline = time.monotonic() + PATIENCE_S
        while ask_status(f"ipc://{around.daemon.socket_path}", PATIENCE_S).metrics[
            "kvferry_engines_attached"
        ]:
            if time.monotonic() > deadline:
                self.problems.append(f"{kind}: the daemon still has the dead engine's memory")
                return
            time.sleep(0.05)
        self._check_daemon(around, kind)

    def _serve_until_killed(self, engine: EngineProcess) -> None:
        with contextlib.suppress(EngineError):
            engine.generate(self.prompts, max_tokens=MAX_TOKENS)

    @property
    def verdict(self) -> list[str]:
        """All that is wrong."""
        found = list(self.problems)
        for kind, row in self.rows.items():
            found += [
                f"{kind}: {row[what]} {what}" for what in ("wrong", "leaked", "hung") if row[what]
            ]
            if row["worst_s"] > BUDGET_S:
                found.append(f"{kind}: a step took {row['worst_s']:.1f} s")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=1, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join([*KINDS, *ENGINE_KINDS]))
    parser.add_argument("--keep", default="", help="folder for logs; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvch") as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        chaos = Chaos(folder, options.seed)
        try:
            chaos.run(options.moments, options.kinds.split(","))
        finally:
            sys.stdout.write(report(chaos.rows, BUDGET_S) + "\n")
        for problem in chaos.verdict:
            sys.stdout.write(f"WRONG: {problem}\n")
    sys.exit(1 if chaos.verdict else 0)


if __name__ == "__main__":
    main()
