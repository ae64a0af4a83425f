"""How ``kvreplay`` prints: lines, tables, stories and verdicts, safe for a terminal."""

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvreplay import stats as counting
from kvreplay import story as telling
from kvreplay import verify as verifying
from kvreplay.scan import Summary
from kvreplay.words import millis, size


def clean(text: str) -> str:
    """A log must not send control sequences to a terminal, or lines that pass for ours."""
    text = "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
    return text.replace("\n", "\n    | ")


def new_console() -> Console:
    """Return a console that prints text as it is."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def new_table(*columns: str) -> Table:
    """Return a table without lines; its first column is text, the others are numbers."""
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def say_written(out: Path, facts: dict[str, int], *, as_json: bool) -> None:
    """Say which file was written, and what is in it."""
    if as_json:
        typer.echo(json.dumps({"file": str(out), **facts}))
    else:
        what = ", ".join(f"{number} {name}" for name, number in facts.items())
        typer.echo(f"{out}: {what}")


def print_line(
    console: Console, text: str, cause: str, *, at: tuple[int, str, int] | None = None
) -> None:
    """Print an event, ``at`` offset, process and sequence number; or a command, without."""
    head = f"{'':52}"
    if at is not None:
        offset_ns, process, seq = at
        head = f"{'+' + millis(offset_ns):>15}  {process:<27} {seq:>6} "
    line = Text(head, style="dim")
    line.append(clean(text) if at is not None else f"→ {clean(text)}")
    if cause:
        line.append(f"  ← {clean(cause)}", style="dim")
    console.print(line)


def print_story(console: Console, told: telling.Story) -> None:
    """Print a story, its sentence last."""
    for line in told.lines:
        if line.what == "event":
            at = (line.offset_ns, line.process, line.seq)
            print_line(console, line.text, line.cause, at=at)
        else:
            print_line(console, line.text, "")
    if told.num_left_out:
        console.print(f"({told.num_left_out} more lines left out)")
    console.print()
    console.print(Text(clean(told.sentence), style="bold"))


def print_counts(console: Console, found: counting.Stats) -> None:
    """Print the tables of ``stats``: answers, ends of jobs, phases."""
    answers = new_table("answer to vLLM", "requests")
    for word, number in found.answers.most_common():
        answers.add_row(clean(word), str(number))
    jobs = new_table("jobs", "outcome", "reason", "ends on ranks")
    for (kind, outcome, reason), number in sorted(found.jobs.items()):
        jobs.add_row(kind, outcome, clean(reason), str(number))
    phases = new_table("phase", "number", "p50 ms", "p95 ms", "max ms")
    for name, times in sorted(found.phases.items()):
        quantiles = (times.quantile_ns(0.5), times.quantile_ns(0.95), times.max_ns)
        phases.add_row(name, str(times.num), *(f"{one / 1e6:.3f}" for one in quantiles))
    for table in (answers, jobs, phases):
        if table.row_count:
            console.print()
            console.print(table)


def print_summary(console: Console, summary: Summary) -> None:
    """Print what ``stats --quick`` counted."""
    table = new_table("kind", "records")
    for name, number in summary.kinds.most_common():
        table.add_row(clean(name), str(number))
    console.print(table)
    text = f"{summary.num_wanted} of {summary.num_records} records, {size(summary.num_bytes)}"
    if summary.num_dropped or summary.num_damaged or summary.torn:
        text += f"; {summary.num_dropped} could not be written, {summary.num_damaged} places "
        text += f"damaged, {len(summary.torn)} files torn"
    console.print(text)


def print_verdict(console: Console, verdict: verifying.Verdict) -> None:
    """Print what ``verify`` found."""
    for replay in verdict.replays:
        text = f"{replay.log}: {replay.result.value}, {replay.num_records} records replayed"
        style = {"same": "green", "different": "bold red"}.get(replay.result.value, "yellow")
        console.print(Text(clean(text + (f"; {replay.why}" if replay.why else "")), style=style))
        if replay.result is verifying.Result.DIFFERENT:
            console.print(Text(clean(f"  event {replay.seq}: {replay.event_text}")))
            for title, lines in (("recorded", replay.expected), ("replayed", replay.actual)):
                console.print(f"  {title}:")
                for line in lines or ["nothing"]:
                    console.print(Text(clean(f"    → {line}")))
    judgement = verdict.judgement
    for one in judgement.violations:
        text = f"{one.log}:{one.seq}: rule {one.rule} is broken: {one.text}"
        console.print(Text(clean(text), style="bold red"))
    if judgement.num_more:
        console.print(f"and {judgement.num_more} more violations")
    if not judgement.violations:
        console.print(Text("rules: none is broken", style="green"))
    for still in judgement.open[:20]:
        console.print(Text(clean(still.sentence), style="dim"))
    if len(judgement.open) > 20:
        console.print(f"and {len(judgement.open) - 20} more that have not ended")
    print_problems(console, verdict.problems, verdict.unreadable)


def print_problems(console: Console, problems: dict[str, list[str]], unreadable: list[str]) -> None:
    """Print what is wrong with the files."""
    for label, texts in problems.items():
        for text in texts:
            console.print(Text(clean(f"{label}: {text}"), style="yellow"))
    for text in unreadable:
        console.print(Text(clean(text), style="yellow"))
