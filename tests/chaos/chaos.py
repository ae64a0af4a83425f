"""Chaos: real vLLM, real Mooncake, real daemons, a mixed load, and processes that die or freeze.

    python -m tests.chaos.chaos --moments 20 --seed 1

Daemons, the master, the engine's core and its workers are killed, frozen and restarted under load
with shared prefixes, chunked prefill, aborts and preemption. After each moment every request that
the engine kept has the tokens of an undisturbed run, none hangs, every block is free again, nothing
stays open or is left behind, and no step or hook took longer than the configured waits. Prints one
table; exits with 1 if anything is wrong.
"""

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from localmaster import LocalMaster
from servers import end_on_sigterm
from tests.chaos.deaths import Succession
from tests.chaos.faults import KINDS, Surroundings
from tests.chaos.leftovers import Shm, Survivor
from tests.chaos.moments import Moments
from tests.chaos.round import Round
from tests.chaos.table import Table
from tests.e2e.stack import Stack, mooncake_file
from tinymodel import make_model


class Chaos:
    """One stack, one engine at a time, and a table of everything that went wrong."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.table = Table()

    def run(self, moments: int, kinds: list[str]) -> None:
        """Strike ``moments`` times with each kind.

        Raises:
            ValueError: an unknown kind.
        """
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ValueError(f"unknown kinds: {unknown}; there are: {', '.join(KINDS)}")
        ranks = max(KINDS[kind].ranks for kind in kinds)
        shm = Shm()
        try:
            # Short names: vLLM puts sockets there.
            with (
                tempfile.TemporaryDirectory(prefix="kvch") as scratch,
                self._surroundings([f"cpu:{rank}" for rank in range(ranks)]) as around,
            ):
                rounds = {
                    ranks: Round(around, shm, self.table, ranks, Path(scratch))
                    for ranks in sorted({KINDS[kind].ranks for kind in kinds})
                }
                self._strike(around, rounds, moments, kinds)
        finally:
            self.table.problems += [f"left in /dev/shm: {name}" for name in shm.sweep()]
        left = [path.name for path in around.stack.run_dir.iterdir() if path.suffix != ".lock"]
        if left:
            self.table.problems.append(f"left in the run directory: {left}")

    @contextlib.contextmanager
    def _surroundings(self, devices: list[str]) -> Iterator[Surroundings]:
        with LocalMaster("--default_kv_lease_ttl=5000") as master:
            model = make_model(self.folder / "model")
            stack = Stack(self.folder, model, mooncake_file(self.folder, master.address))
            with Surroundings(stack, master, self.rng, devices) as around:
                yield around

    def _strike(
        self, around: Surroundings, rounds: dict[int, Round], moments: int, kinds: list[str]
    ) -> None:
        """First the engines that live on, for each number of ranks, then those that die."""
        for ranks, this in rounds.items():
            this.learn()
            if chosen := self._chosen(moments, kinds, ranks, deadly=False):
                Moments(this).run(chosen)
        daemon = Survivor(f"daemon {around.devices[0]}, under dying engines")
        for ranks, this in rounds.items():
            if chosen := self._chosen(moments, kinds, ranks, deadly=True):
                Succession(this, daemon).run(chosen)
        if daemon.samples:
            self.table.survivors.append(daemon)

    def _chosen(self, moments: int, kinds: list[str], ranks: int, *, deadly: bool) -> list[str]:
        chosen = [
            kind for kind in kinds if KINDS[kind].ranks == ranks and KINDS[kind].deadly is deadly
        ] * moments
        self.rng.shuffle(chosen)
        return chosen


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=1, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--keep", default="", help="folder for logs; default: a temporary one")
    parser.add_argument("--out", default="", help="file for the table as JSON")
    options = parser.parse_args()
    kinds = [kind.strip() for kind in options.kinds.split(",")]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"unknown kinds: {unknown}; there are: {', '.join(KINDS)}")
    end_on_sigterm()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvch") as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        chaos = Chaos(folder, options.seed)
        try:
            chaos.run(options.moments, kinds)
        finally:
            sys.stdout.write(chaos.table.text() + "\n")
            if options.out:
                seconds = time.monotonic() - began
                data = {"seed": options.seed, "seconds": seconds, **chaos.table.data()}
                Path(options.out).write_text(json.dumps(data, indent=1) + "\n", "utf-8")
        for problem in chaos.table.verdict:
            sys.stdout.write(f"WRONG: {problem}\n")
    sys.exit(1 if chaos.table.verdict else 0)


if __name__ == "__main__":
    main()
