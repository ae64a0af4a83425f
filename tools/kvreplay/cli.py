"""The command line of ``kvreplay``.

Exit status: 0 all is well; 1 ``verify`` found a difference or a broken rule; 2 the logs could not
be read, or not be checked in full, or the question was wrong.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvreplay import plot as plotting
from kvreplay import show as showing
from kvreplay import stats as counting
from kvreplay import story as telling
from kvreplay import trace as tracing
from kvreplay import verify as verifying
from kvreplay.links import Mentions
from kvreplay.loading import LogSet, open_logs
from kvreplay.words import command_text, event_text, millis, size

app = typer.Typer(
    help="Read kvferry's event logs: what happened, why, and does it obey the rules.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_OK: Final = 0
_WRONG: Final = 2

Logs = Annotated[
    list[Path], typer.Argument(help="Log files, or directories of them.", show_default=False)
]
LogDir = Annotated[
    list[Path], typer.Argument(help="Directories of logs, or log files.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


@app.command()
def show(
    logs: Logs,
    *,
    request: Annotated[str | None, typer.Option(help="Id of a request, or its start.")] = None,
    job: Annotated[int | None, typer.Option(help="Id of a job.")] = None,
    step: Annotated[int | None, typer.Option(help="Number of a step.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="Type of an event, a command or a message.")
    ] = None,
    ticks: Annotated[
        bool, typer.Option("--ticks", help="Also show that time passed and nothing came of it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show records in causal order; with --json one JSON object a line."""
    found = _open(logs)
    with _wrong_questions():
        name = telling.find_request(found, request) if request is not None else None
    filters = showing.Filters(name, job, step, kind=kind, ticks=ticks)
    console = _console()
    mentions = Mentions()
    first_ns: int | None = None
    for entry in showing.select(found, filters):
        if as_json:
            typer.echo(json.dumps(showing.as_plain(entry, mentions)))
            continue
        first_ns = entry.at_ns if first_ns is None else first_ns
        what = entry.problem or event_text(entry.event)
        what += f"; the core failed: {entry.fault}" if entry.fault else ""
        _line(console, what, entry.cause, at=(entry.at_ns - first_ns, entry.log, entry.seq))
        for command in entry.commands:
            _line(console, command_text(command), "")
    if not as_json:
        _print_problems(console, {log.label: log.problems for log in found.logs}, found.unreadable)


@app.command()
def stats(logs: Logs, *, as_json: AsJson = False) -> None:
    """Count: hit rate, bytes, latencies by phase, reasons of misses and failures."""
    found = counting.gather(_open(logs))
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=2))
        return
    console = _console()
    facts = _table("what", "how much")
    total = sum(found.answers.values())
    hits = found.answers["hit"]
    facts.add_row("records", str(sum(found.num_records.values())))
    facts.add_row("requests", str(found.num_requests))
    facts.add_row("answered with a hit", f"{hits} of {total}" if total else "none was asked")
    facts.add_row("tokens", str(found.num_tokens))
    facts.add_row("tokens to be loaded", str(found.external_tokens))
    facts.add_row("loaded", size(found.loaded_bytes))
    facts.add_row("saved", size(found.saved_bytes))
    facts.add_row("faults of a core", str(found.faults))
    console.print(facts)
    _print_counts(console, found)
    _print_problems(console, found.problems, found.unreadable)


@app.command()
def story(
    logs: LogDir,
    request: Annotated[str, typer.Argument(help="Id of a request, or its start.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Tell what happened to one request, across all processes, and why."""
    found = _open(logs)
    with _wrong_questions():
        told = telling.tell(found, telling.find_request(found, request))
    if as_json:
        typer.echo(json.dumps(told.plain(), indent=2))
        return
    _print_story(_console(), told)


@app.command()
def verify(logs: LogDir, *, as_json: AsJson = False) -> None:
    """Run the cores again on what was recorded, compare, and check the rules."""
    found = _open(logs)
    verdict = verifying.verify(found)
    request = next(
        (replay.request for replay in verdict.replays if replay.request),
        next((one.request for one in verdict.judgement.violations if one.request), ""),
    )
    told = telling.tell(found, request) if request and verdict.status == 1 else None
    if as_json:
        result = {**verdict.plain(), "story": told.plain() if told else None}
        typer.echo(json.dumps(result, indent=2))
    else:
        _print_verdict(_console(), verdict)
        if told:
            _console().print(Text(f"\nThe story of {_clean(told.request_id)}:", style="bold"))
            _print_story(_console(), told)
    raise typer.Exit(verdict.status)


@app.command()
def trace(
    logs: LogDir,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("trace.json"),
    as_json: AsJson = False,
) -> None:
    """Write a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    found = _open(logs)
    with _wrong_questions(), out.open("w", encoding="utf-8") as file:
        num_events = tracing.write_trace(found, file)
    _say_written(out, {"events": num_events}, as_json=as_json)


@app.command()
def plot(
    logs: LogDir,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("overlap.png"),
    steps: Annotated[int, typer.Option(help="Draw so many of the newest steps.", min=1)] = 6,
    as_json: AsJson = False,
) -> None:
    """Draw transfers against layers."""
    times = plotting.collect(_open(logs))
    with _wrong_questions():
        plotting.draw(times, out, max_steps=steps)
    _say_written(out, {"steps": len(times)}, as_json=as_json)


def main() -> None:
    """Entry point of the console command."""
    app()


def _open(paths: list[Path]) -> LogSet:
    logs = open_logs(paths)
    if not logs.logs:
        for text in logs.unreadable or ["no logs given"]:
            _complain(text)
        raise typer.Exit(_WRONG)
    return logs


@contextmanager
def _wrong_questions() -> Iterator[None]:
    """Say in one line what cannot be answered, and exit."""
    try:
        yield
    except (telling.NoSuchRequestError, plotting.PlotError) as error:
        _complain(str(error))
        raise typer.Exit(_WRONG) from None
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}")
        raise typer.Exit(_WRONG) from None


def _complain(text: str) -> None:
    typer.echo(f"kvreplay: {_clean(text)}", err=True)


def _clean(text: str) -> str:
    """A log must not be able to send control sequences to a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def _console() -> Console:
    return Console(highlight=False, markup=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _say_written(out: Path, facts: dict[str, int], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"file": str(out), **facts}))
    else:
        what = ", ".join(f"{number} {name}" for name, number in facts.items())
        typer.echo(f"{out}: {what}")


def _line(
    console: Console, text: str, cause: str, *, at: tuple[int, str, int] | None = None
) -> None:
    """Print an event, ``at`` offset, process and sequence number; or a command, without."""
    head = f"{'':52}"
    if at is not None:
        offset_ns, process, seq = at
        head = f"{'+' + millis(offset_ns):>15}  {process:<27} {seq:>6} "
    line = Text(head, style="dim")
    line.append(_clean(text) if at is not None else f"→ {_clean(text)}")
    if cause:
        line.append(f"  ← {_clean(cause)}", style="dim")
    console.print(line)


def _print_story(console: Console, told: telling.Story) -> None:
    for line in told.lines:
        if line.what == "event":
            at = (line.offset_ns, line.process, line.seq)
            _line(console, line.text, line.cause, at=at)
        else:
            _line(console, line.text, "")
    if told.num_left_out:
        console.print(f"({told.num_left_out} more lines left out)")
    console.print()
    console.print(Text(_clean(told.sentence), style="bold"))


def _print_counts(console: Console, found: counting.Stats) -> None:
    answers = _table("answer to vLLM", "requests")
    for word, number in found.answers.most_common():
        answers.add_row(_clean(word), str(number))
    jobs = _table("jobs", "outcome", "reason", "ends on ranks")
    for (kind, outcome, reason), number in sorted(found.jobs.items()):
        jobs.add_row(kind, outcome, _clean(reason), str(number))
    phases = _table("phase", "number", "p50 ms", "p95 ms", "max ms")
    for name, times in sorted(found.phases.items()):
        quantiles = (times.quantile_ns(0.5), times.quantile_ns(0.95), times.max_ns)
        phases.add_row(name, str(times.num), *(f"{one / 1e6:.3f}" for one in quantiles))
    for table in (answers, jobs, phases):
        if table.row_count:
            console.print()
            console.print(table)


def _print_verdict(console: Console, verdict: verifying.Verdict) -> None:
    for replay in verdict.replays:
        text = f"{replay.log}: {replay.result.value}, {replay.num_records} records replayed"
        style = {"same": "green", "different": "bold red"}.get(replay.result.value, "yellow")
        console.print(Text(_clean(text + (f"; {replay.why}" if replay.why else "")), style=style))
        if replay.result is verifying.Result.DIFFERENT:
            console.print(Text(_clean(f"  event {replay.seq}: {replay.event_text}")))
            for title, lines in (("recorded", replay.expected), ("replayed", replay.actual)):
                console.print(f"  {title}:")
                for line in lines or ["nothing"]:
                    console.print(Text(_clean(f"    → {line}")))
    judgement = verdict.judgement
    for one in judgement.violations:
        text = f"{one.log}:{one.seq}: rule {one.rule} is broken: {one.text}"
        console.print(Text(_clean(text), style="bold red"))
    if judgement.num_more:
        console.print(f"and {judgement.num_more} more violations")
    if not judgement.violations:
        console.print(Text("rules: none is broken", style="green"))
    for still in judgement.open[:20]:
        console.print(Text(_clean(f"{still.log}: open at the end: {still.text}"), style="dim"))
    if len(judgement.open) > 20:
        console.print(f"and {len(judgement.open) - 20} more open at the end")
    _print_problems(console, verdict.problems, verdict.unreadable)


def _print_problems(
    console: Console, problems: dict[str, list[str]], unreadable: list[str]
) -> None:
    for label, texts in problems.items():
        for text in texts:
            console.print(Text(_clean(f"{label}: {text}"), style="yellow"))
    for text in unreadable:
        console.print(Text(_clean(text), style="yellow"))
