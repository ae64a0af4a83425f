"""``kvworker top``: all daemons of a run directory, and what they did in the last seconds."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvcommon.errors import ConfigError
from kvcommon.messages import Status, StoreState
from kvworker.ask import ask_status
from kvworker.descriptor import read_descriptor

_MEGA: Final = 1e6
#: Titles. Open jobs; of the blocks asked for in lookups those that were found; failed jobs.
COLUMNS: Final = (
    "device", "store", "engines", "open", "save MB/s", "load MB/s", "lookups/s", "found",
    "failed/s",
)  # fmt: skip


_GAUGES: Final = ("engines_attached", "jobs_open")
_NUM_NAMES: Final = 2


class Reading(NamedTuple):
    """One daemon at one moment."""

    endpoint: str
    #: None: it does not answer.
    status: Status | None
    at_s: float


def find_endpoints(directory: Path) -> list[str]:
    """Endpoints of the daemons that serve in a run directory, by device.

    Raises:
        ConfigError: there is none.
    """
    found = [read_descriptor(path) for path in sorted(directory.glob("*.json"))]
    endpoints = [each.endpoint for each in found if each is not None]
    if not endpoints:
        raise ConfigError(
            f"no daemon serves in {directory}: start one with kvworker serve, or name another "
            "directory with --run-dir"
        )
    return endpoints


def read(endpoints: Sequence[str], timeout_s: float) -> list[Reading]:
    """Ask every daemon."""
    readings = []
    for endpoint in endpoints:
        status = None
        with contextlib.suppress(ConfigError):  # shown as "no answer"
            status = ask_status(endpoint, timeout_s)
        readings.append(Reading(endpoint, status, time.monotonic()))
    return readings


def row(before: Reading | None, now: Reading) -> list[str]:
    """What one daemon's line says: gauges of now, and rates since ``before``.

    Without a ``before``, or if the daemon is another one since, rates are not known yet.
    """
    status = now.status
    if status is None:
        nothing = [""] * (len(COLUMNS) - _NUM_NAMES)
        return [escape(now.endpoint), "[bold red]no answer[/bold red]", *nothing]
    state = "up" if status.store_state is StoreState.UP else "[bold red]DOWN[/bold red]"
    gauges = [f"{status.metrics.get(f'kvferry_{name}', 0):g}" for name in _GAUGES]
    line = [escape(status.device), f"{escape(status.store)} {state}", *gauges]
    old = before.status if before is not None else None
    if before is None or old is None or old.pid != status.pid or now.at_s <= before.at_s:
        return [*line, *["-"] * (len(COLUMNS) - len(line))]
    seconds = now.at_s - before.at_s

    def more(name: str, *labels: str) -> float:
        return _total(status.metrics, name, labels) - _total(old.metrics, name, labels)

    asked = more("lookup_blocks_total")
    share = f"{more('lookup_hit_blocks_total') / asked:.0%}" if asked else "-"
    return [
        *line,
        f"{more('bytes_total', 'save') / seconds / _MEGA:.1f}",
        f"{more('bytes_total', 'load') / seconds / _MEGA:.1f}",
        f"{more('lookups_total') / seconds:.1f}",
        share,
        f"{more('jobs_ended_total', 'failed') / seconds:.1f}",
    ]


def _total(metrics: dict[str, float], name: str, labels: Sequence[str]) -> float:
    """Sum of a counter over all its labels, of which these values must be among them."""
    return sum(
        value
        for key, value in metrics.items()
        if key.partition("{")[0] == f"kvferry_{name}"
        and all(f'"{label}"' in key for label in labels)
    )


def show(
    endpoints: Sequence[str], interval_s: float, rounds: int, console: Console | None = None
) -> None:
    """Show the daemons until the user stops it, or for so many rounds (0: no end)."""
    before: dict[str, Reading] = {}
    shown = 0
    with Live(console=console or Console(), auto_refresh=False) as live:
        while not rounds or shown < rounds:
            if shown:
                time.sleep(interval_s)
            readings = read(endpoints, max(interval_s, 1.0))
            live.update(_table(before, readings), refresh=True)
            before = {reading.endpoint: reading for reading in readings}
            shown += 1


def _table(before: dict[str, Reading], readings: Sequence[Reading]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for index, title in enumerate(COLUMNS):
        table.add_column(title, justify="left" if index < _NUM_NAMES else "right")
    for reading in readings:
        table.add_row(*row(before.get(reading.endpoint), reading))
    return table
