"""What ``kvworker status`` and ``kvworker doctor`` print for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from kvcommon.messages import Status, StoreState
from kvworker.doctor.report import Finding, Verdict

#: How a check came out.
_MARKS = {
    Verdict.OK: "[green]ok  [/green] ",
    Verdict.WARN: "[yellow]warn[/yellow] ",
    Verdict.FAIL: "[bold red]FAIL[/bold red] ",
    Verdict.SKIP: "[dim]skip[/dim] ",
}
_Row = dict[str, "str | int | float | bool"]


def print_status(status: Status, console: Console | None = None) -> None:
    """Print a daemon's description."""
    console = console or Console()
    state = "up" if status.store_state is StoreState.UP else "[bold red]DOWN[/bold red]"
    console.print(
        f"[bold]{status.device}[/bold]  pid {status.pid}  kvferry {status.version}  "
        f"up {_duration(status.uptime_s)}"
    )
    console.print(f"store {status.store}: {state}   endpoint {status.endpoint}")
    _print_table(console, "Engines", status.engines, "no engine has attached yet")
    _print_table(console, "Last jobs", status.recent, "no job has ended yet")
    numbers = [{"name": name, "value": f"{value:g}"} for name, value in status.metrics.items()]
    _print_table(console, "Metrics", sorted(numbers, key=lambda row: row["name"]), "none")


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print what the doctor found, each remedy below its finding."""
    console = console or Console()
    for finding in findings:
        mark = _MARKS[finding.verdict]
        # Texts have brackets of their own: kvferry[npu].
        text = f"{mark} {escape(finding.name)}: {escape(finding.found)}"
        if finding.remedy:
            text += f"\n        {escape(finding.remedy)}"
        console.print(text, highlight=False, soft_wrap=True)


def _print_table(
    console: Console, title: str, rows: Sequence[_Row] | Sequence[dict[str, str]], empty: str
) -> None:
    """Print a table with the columns that its rows have, in order of first appearance.

    Where it would have to cut words (a narrow terminal, a pipe), each row is a paragraph instead.
    """
    if not rows:
        console.print(f"{title}: {empty}")
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(escape(_text(row.get(name, ""))) for name in columns))
    if Measurement.get(console, console.options, table).maximum < console.width:
        console.print(table)
        return
    console.print(title)
    for row in rows:
        pairs = [f"{name.replace('_', ' ')} {_text(value)}" for name, value in row.items()]
        console.print("  " + escape(", ".join(pairs)), highlight=False, soft_wrap=True)


def _text(value: "str | float | bool") -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
