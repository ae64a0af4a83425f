"""What chaos counts, and what it says about it."""

import dataclasses
from typing import Any

from tests.chaos.leftovers import Survivor

LOAD_TIMEOUT_MS, FENCE_TIMEOUT_MS, LEASE_MS = 3000, 4000, 3000
#: Beside the wait for loads, what a hook may take: the wait for the message that names failed
#: blocks (0.5 s), and its own computing. Time in which it was given no processor does not count.
HOOK_BUDGET_S = LOAD_TIMEOUT_MS / 1e3 + 1.0
#: A step's own computing on a busy machine, beside its one wait for loads.
COMPUTE_S = 4.0
STEP_BUDGET_S = LOAD_TIMEOUT_MS / 1e3 + COMPUTE_S
TITLES = (
    "fault",
    "faults",
    "requests",
    "aborted",
    "preempted",
    "chunked",
    "from store",
    "busy s",
    "worst hook s",
    "wrong tokens",
    "leaked blocks",
    "hung",
    "worst stall s",
)


@dataclasses.dataclass
class Row:
    """One kind of fault."""

    moments: int = 0
    requests: int = 0
    aborted: int = 0
    preempted: int = 0
    #: Prompts that were computed in more than one step, once per step but the last.
    chunked: int = 0
    #: Tokens that came from the store.
    hit_tokens: int = 0
    #: Requests with a wrong token.
    wrong: int = 0
    leaked: int = 0
    hung: int = 0
    #: Longest call of a hook of the connector but for time without a processor, and which it was.
    hook_s: float = 0.0
    hook: str = ""
    #: Longest step.
    step_s: float = 0.0
    #: Moments that came when the load was already served.
    idle: int = 0
    seconds: float = 0.0

    def cells(self) -> list[str]:
        """Its columns, in the order of ``TITLES``."""
        counts = (self.moments, self.requests, self.aborted, self.preempted, self.chunked)
        return [
            *map(str, (*counts, self.hit_tokens)),
            f"{self.seconds:.1f}",
            f"{self.hook_s:.2f}",
            *map(str, (self.wrong, self.leaked, self.hung)),
            f"{self.step_s:.2f}",
        ]


class Table:
    """Everything that was counted, and everything that went wrong."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.problems: list[str] = []
        self.survivors: list[Survivor] = []
        #: The load was measured where it was scheduled.
        self.watched = False

    def row(self, kind: str) -> Row:
        """The row of a kind."""
        return self.rows.setdefault(kind, Row())

    def total(self) -> Row:
        """All rows in one."""
        total = Row()
        for row in self.rows.values():
            for field in dataclasses.fields(Row):
                mine, other = getattr(total, field.name), getattr(row, field.name)
                if field.name in ("hook_s", "step_s", "hook"):
                    continue
                setattr(total, field.name, mine + other)
            total.step_s = max(total.step_s, row.step_s)
            total.hook_s, total.hook = max((total.hook_s, total.hook), (row.hook_s, row.hook))
        return total

    @property
    def verdict(self) -> list[str]:
        """All that is wrong."""
        found = list(self.problems)
        for kind, row in self.rows.items():
            found += [
                f"{kind}: {getattr(row, what)} {what}"
                for what in ("wrong", "leaked", "hung")
                if getattr(row, what)
            ]
            if row.step_s > STEP_BUDGET_S:
                found.append(f"{kind}: a step took {row.step_s:.1f} s")
            if row.hook_s > HOOK_BUDGET_S:
                found.append(f"{kind}: {row.hook} took {row.hook_s:.1f} s")
        total = self.total()
        wanted = ("preempted", "chunked", "aborted", "hit_tokens") if self.watched else ()
        found += [
            f"the load is not what it should be: {what} is 0"
            for what in wanted
            if not getattr(total, what)
        ]
        if 2 * total.idle > total.moments:
            found.append(f"{total.idle} of {total.moments} moments met no load")
        return found + [problem for each in self.survivors for problem in each.problems]

    def text(self) -> str:
        """The table for a person."""
        cells = [list(TITLES)]
        cells += [[kind, *row.cells()] for kind, row in self.rows.items()]
        cells.append(["all", *self.total().cells()])
        widths = [max(len(row[column]) for row in cells) for column in range(len(TITLES))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in cells
        ]
        lines.append(f"budgets: stall {STEP_BUDGET_S:.1f} s, hook {HOOK_BUDGET_S:.1f} s")
        lines += [each.text() for each in self.survivors]
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """The table for a program."""
        return {
            "rows": {kind: dataclasses.asdict(row) for kind, row in self.rows.items()},
            "total": dataclasses.asdict(self.total()),
            "budgets": {"stall_s": STEP_BUDGET_S, "hook_s": HOOK_BUDGET_S},
            "survivors": [each.data() for each in self.survivors],
            "wrong": self.verdict,
        }
