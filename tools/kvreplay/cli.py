"""The command line of ``kvreplay``.

Exit status: 0 all is well; 1 ``verify`` found a difference or a broken rule, ``diff`` a divergence,
``run`` another outcome or a wrong byte; 2 the logs could not be read, or not be checked in full, or
the question was wrong.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvreplay import cli_runs
from kvreplay import convert as converting
from kvreplay import plot as plotting
from kvreplay import report as reporting
from kvreplay import scan as scanning
from kvreplay import show as showing
from kvreplay import stats as counting
from kvreplay import story as telling
from kvreplay import trace as tracing
from kvreplay import verify as verifying
from kvreplay.asking import AsJson, LogDir, Logs, open_or_exit, wrong_questions
from kvreplay.links import Mentions
from kvreplay.printing import (
    clean,
    new_console,
    new_table,
    print_counts,
    print_line,
    print_problems,
    print_story,
    print_summary,
    print_verdict,
    say_written,
)
from kvreplay.words import command_text, event_text, size

app = typer.Typer(
    help="Read kvferry's event logs: what happened, why, and does it obey the rules.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    from_s: Annotated[
        float, typer.Option("--from", help="Seconds after the first record; from here.")
    ] = 0.0,
    to_s: Annotated[
        float | None, typer.Option("--to", help="Seconds after the first record; up to here.")
    ] = None,
    ticks: Annotated[
        bool, typer.Option("--ticks", help="Also show that time passed and nothing came of it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show records in causal order; with --json one JSON object a line."""
    found = open_or_exit(logs)
    with wrong_questions():
        name = telling.find_request(found, request) if request is not None else None
    filters = showing.Filters(
        name,
        job,
        step,
        kind=kind,
        ticks=ticks,
        from_ns=round(from_s * 1e9),
        to_ns=None if to_s is None else round(to_s * 1e9),
    )
    console = new_console()
    mentions = Mentions()
    first_ns: int | None = None
    for entry in showing.select(found, filters):
        if as_json:
            typer.echo(json.dumps(showing.as_plain(entry, mentions)))
            continue
        first_ns = entry.at_ns if first_ns is None else first_ns
        what = entry.problem or event_text(entry.event)
        what += f"; the core failed: {entry.fault}" if entry.fault else ""
        print_line(console, what, entry.cause, at=(entry.at_ns - first_ns, entry.log, entry.seq))
        for command in entry.commands:
            print_line(console, command_text(command), "")
    if not as_json:
        print_problems(console, {log.label: log.problems for log in found.logs}, found.unreadable)


@app.command()
def stats(
    logs: Logs,
    *,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Only count records by kind; for very large logs."),
    ] = False,
    request: Annotated[str | None, typer.Option(help="With --quick: id of a request.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="With --quick: type of an event, a command or a message.")
    ] = None,
    from_s: Annotated[
        float, typer.Option("--from", help="With --quick: seconds after the first record.")
    ] = 0.0,
    to_s: Annotated[
        float | None, typer.Option("--to", help="With --quick: seconds after the first record.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count: hit rate, bytes, latencies by phase, reasons of misses and failures."""
    if quick:
        to_ns = None if to_s is None else round(to_s * 1e9)
        wanted = scanning.Wanted(request, kind, from_ns=round(from_s * 1e9), to_ns=to_ns)
        summary = scanning.scan(open_or_exit(logs), wanted)
        if as_json:
            typer.echo(json.dumps(summary.plain(), indent=2))
        else:
            print_summary(new_console(), summary)
        return
    found = counting.gather(open_or_exit(logs))
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=2))
        return
    console = new_console()
    facts = new_table("what", "how much")
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
    print_counts(console, found)
    print_problems(console, found.problems, found.unreadable)


@app.command()
def story(
    logs: LogDir,
    request: Annotated[str, typer.Argument(help="Id of a request, or its start.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Tell what happened to one request, across all processes, and why."""
    found = open_or_exit(logs)
    with wrong_questions():
        told = telling.tell(found, telling.find_request(found, request))
    if as_json:
        typer.echo(json.dumps(told.plain(), indent=2))
        return
    print_story(new_console(), told)


@app.command()
def verify(logs: LogDir, *, as_json: AsJson = False) -> None:
    """Run the cores again on what was recorded, compare, and check the rules."""
    found = open_or_exit(logs)
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
        print_verdict(new_console(), verdict)
        if told:
            new_console().print(Text(f"\nThe story of {clean(told.request_id)}:", style="bold"))
            print_story(new_console(), told)
    raise typer.Exit(verdict.status)


app.command()(cli_runs.diff)
app.command()(cli_runs.run)


@app.command()
def trace(
    logs: LogDir,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("trace.json"),
    as_json: AsJson = False,
) -> None:
    """Write a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    found = open_or_exit(logs)
    with wrong_questions(), out.open("w", encoding="utf-8") as file:
        num_events = tracing.write_trace(found, file)
    say_written(out, {"events": num_events}, as_json=as_json)


@app.command()
def plot(
    logs: LogDir,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("overlap.png"),
    steps: Annotated[int, typer.Option(help="Draw so many of the newest steps.", min=1)] = 6,
    as_json: AsJson = False,
) -> None:
    """Draw transfers against layers."""
    times = plotting.collect(open_or_exit(logs))
    with wrong_questions():
        plotting.draw(times, out, max_steps=steps)
    say_written(out, {"steps": len(times)}, as_json=as_json)


@app.command()
def report(
    logs: LogDir,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write one HTML file with a timeline, all requests and their stories, and the check."""
    found = open_or_exit(logs)
    with wrong_questions():
        num_bytes = out.write_text(reporting.make_report(found), encoding="utf-8")
    say_written(out, {"bytes": num_bytes}, as_json=as_json)


@app.command()
def convert(
    files: Annotated[list[Path], typer.Argument(help="Log files of an older format.")],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the new files.")],
    as_json: AsJson = False,
) -> None:
    """Bring log files of older formats to the present one."""
    for path in files:
        with wrong_questions():
            new = str(converting.convert(path, out))
        typer.echo(json.dumps({"old": str(path), "new": new}) if as_json else clean(new))


def main() -> None:
    """Entry point of the console command."""
    app()
