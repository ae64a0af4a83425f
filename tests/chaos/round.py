"""What the moments of one setting share: the load, what it must answer, and what must be quiet."""

import sys
import time
from pathlib import Path
from typing import Any

from kvcommon.errors import ConfigError
from kvworker.ask import ask_status
from tests.chaos.faults import Frozen, Surroundings
from tests.chaos.leftovers import Shm
from tests.chaos.measure import longest, longest_run
from tests.chaos.table import (
    FENCE_TIMEOUT_MS,
    HOOK_BUDGET_S,
    LEASE_MS,
    LOAD_TIMEOUT_MS,
    STEP_BUDGET_S,
    Row,
    Table,
)
from tests.chaos.victim import Setting, Victim
from tests.e2e.stack import prompt

MAX_TOKENS = 24
PATIENCE_S, ANSWER_S = 60.0, 5.0
_OPEN = [f"kvferry_{what}_open" for what in ("jobs", "lookups", "puts", "gets")]
_ATTACHED = ["kvferry_engines_attached"]
_HEADS = [prompt(1 + head, 320) for head in range(3)]
#: Shared prefixes, of several blocks and of parts of blocks.
PROMPTS = [
    _HEADS[number % 3][: 320 - 32 * (number % 2)] + prompt(50 + number, 40 + 37 * number)
    for number in range(9)
]


class Round:
    """One number of ranks."""

    def __init__(
        self, around: Surroundings, shm: Shm, table: Table, ranks: int, scratch: Path
    ) -> None:
        self.around = around
        self.table = table
        self.ranks = ranks
        self.rng = around.rng
        self._shm = shm
        self._scratch = scratch
        self._wanted: list[list[int]] = []
        self._count = 0

    def engine(self, *, in_process: bool, cached: bool = True) -> Victim:
        """Make the next engine, not started yet."""
        connector = self.around.stack.connector(
            lookup_timeout_ms=500,
            load_timeout_ms=LOAD_TIMEOUT_MS,
            fence_timeout_ms=FENCE_TIMEOUT_MS,
            lease_ms=LEASE_MS,
        )
        self._count += 1
        stack = self.around.stack
        log = stack.folder / f"engine-{self.ranks}-{self._count}.log"
        setting = Setting(self.ranks, in_process)
        return setting.engine(stack.model, log, self._scratch, connector if cached else None)

    def learn(self) -> None:
        """What an undisturbed engine without any cache answers."""
        say(f"an undisturbed engine of {self.ranks}")
        with self.engine(in_process=True, cached=False) as reference:
            answers = reference.generate(PROMPTS, max_tokens=MAX_TOKENS, together=False)
            self._wanted = [answer["tokens"] for answer in answers]
            reference.bury()
        self._shm.sweep()

    def chosen(self, count: int) -> list[int]:
        """Numbers of prompts for a load."""
        return [self.rng.randrange(len(PROMPTS)) for _ in range(count)]

    def check_answer(
        self, row: Row, where: str, chosen: list[int], aborted: list[int], answer: dict[str, Any]
    ) -> None:
        """Compare the tokens of a load."""
        for position, index in enumerate(chosen):
            tokens = answer["tokens"][position]
            if tokens is None:
                row.aborted += position in aborted
                if position not in aborted and not answer["hung"]:
                    self.problem(f"{where}: a request has no answer")
            elif tokens != self._wanted[index]:
                row.wrong += 1
        row.hung += answer["hung"]
        row.seconds += answer["seconds"]

    def note_spans(
        self, row: Row, answer: dict[str, Any], measured: dict[str, Any], frozen: Frozen = None
    ) -> None:
        """Keep the longest step and the longest hook."""
        _, _, step_s, starved_s = longest(answer["steps"], frozen)
        row.step_s = max(row.step_s, step_s)
        if step_s > STEP_BUDGET_S / 2:
            say(f"a step of {step_s:.2f} s, {starved_s:.2f} s of it without a processor")
        name, _, hook_s, starved_s = longest_run(measured["hooks"], frozen)
        row.hook_s, row.hook = max((row.hook_s, row.hook), (hook_s, name))
        if hook_s > HOOK_BUDGET_S / 2:
            say(f"{name} ran for {hook_s:.2f} s, and was {starved_s:.2f} s without a processor")
        row.preempted += measured["preempted"]
        row.chunked += measured["chunked"]

    def check_alive(self, where: str) -> None:
        """No daemon had a reason to end."""
        if gone := self.around.gone:
            self.problem(f"{where}: {gone}: ended, although they were well")
            self.around.heal()

    def check_daemons(self, where: str, *, attached: bool, fenced: bool = False) -> None:
        """Nothing stays open once all is quiet, and nothing mapped once the engine is gone.

        ``fenced``: a daemon was given a reason to be killed, which may take effect only now.
        """
        names = _OPEN if attached else _OPEN + _ATTACHED
        deadline = time.monotonic() + PATIENCE_S
        for device in self.around.devices:
            while left := self._open_at(device, names):
                if fenced:
                    self.around.heal()
                if time.monotonic() > deadline:
                    self.problem(f"{where}: daemon {device}: {left}")
                    break
                time.sleep(0.05)

    def _open_at(self, device: str, names: list[str]) -> str:
        """What is open at a daemon; empty: nothing."""
        try:
            endpoint = f"ipc://{self.around.daemons[device].socket_path}"
            metrics = ask_status(endpoint, ANSWER_S).metrics
        except ConfigError as error:
            return str(error)
        left = {name: metrics[name] for name in names if metrics[name]}
        return f"left open: {left}" if left else ""

    def bury(self, engine: Victim, where: str) -> None:
        """Wait for the end of an engine, and see that nothing of it is left."""
        if left := engine.bury():
            self.problem(f"{where}: did not end by themselves: {left}")
        self.check_daemons(where, attached=False)
        if names := self._shm.sweep():
            self.problem(f"{where}: left in /dev/shm: {names}")

    def problem(self, text: str) -> None:
        """Note what is wrong, now and for the verdict."""
        say(f"WRONG: {text}")
        self.table.problems.append(text)


def say(text: str) -> None:
    """A line for whoever watches."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()
