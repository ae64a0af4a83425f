"""The commands that compare runs and play them again: ``diff`` and ``run``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvreplay import run as running
from kvreplay.asking import AsJson, LogDir, OneLogDir, open_or_exit, wrong_questions
from kvreplay.diff import Diff, Row, compare
from kvreplay.printing import clean, new_console, new_table
from kvreplay.story import find_request


def diff(a: OneLogDir, b: OneLogDir, *, as_json: AsJson = False) -> None:
    """Say where two runs first part, request by request, and how their numbers differ."""
    found = compare(open_or_exit([a]), open_or_exit([b]))
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=2))
    else:
        _print_diff(new_console(), found)
    raise typer.Exit(found.status)


def run(
    logs: LogDir,
    *,
    mooncake_config: Annotated[
        str, typer.Option(help="Play against Mooncake, as this JSON file says.")
    ] = "",
    memory_limit: Annotated[str, typer.Option(help="Size of the memory store.")] = "1GiB",
    speed: Annotated[
        float,
        typer.Option(min=0.0, help="1: at recorded pace; 2: twice as fast; 0: as fast as it goes."),
    ] = 0.0,
    until: Annotated[
        float | None, typer.Option(help="Stop at so many seconds of the recording.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Play only this request: its id, or its start.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the blocks' content.")] = 0,
    limit: Annotated[float, typer.Option(help="Give up after so many seconds.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="Keep the logs of the run here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play the daemons' logs to real daemons, with synthetic KV memory, and compare."""
    found = open_or_exit(logs)
    with wrong_questions():
        wishes = running.Wishes(
            mooncake_config=mooncake_config,
            memory_limit=memory_limit,
            speed=speed,
            until_s=until,
            only=None if only is None else find_request(found, only),
            seed=seed,
            limit_s=limit,
            out=out,
        )
        report = running.run(found, wishes)
    if as_json:
        typer.echo(json.dumps(report.plain(), indent=2))
    else:
        _print_report(new_console(), report)
    raise typer.Exit(report.status)


def _print_diff(console: Console, found: Diff) -> None:
    first = found.first
    if first is None:
        console.print(Text(f"{found.num_a} requests went the same way", style="green"))
    else:
        text = f"{found.num_different} of {max(found.num_a, found.num_b)} requests went another way"
        console.print(Text(text, style="bold red"))
        console.print(f"the first is number {first.number}:")
        for side, request, sentence, record in (
            ("A", first.request_a, first.sentence_a, first.record_a),
            ("B", first.request_b, first.sentence_b, first.record_b),
        ):
            text = sentence or f"{request or 'it'} is not there"
            console.print(Text(clean(f"  {side}: {text}")))
            if record:
                console.print(Text(clean(f"     its records part at {record}"), style="dim"))
        for text in first.what:
            console.print(Text(clean(f"  {text}")))
    if any(found.left_out):
        text = f"beyond the bound, and not compared: {found.left_out[0]} requests of A, "
        console.print(Text(f"{text}{found.left_out[1]} of B", style="yellow"))
    console.print()
    _print_rows(console, found.rows, ("A", "B"))


def _print_report(console: Console, report: running.Report) -> None:
    text = f"{report.num_said} messages played in {report.seconds:.1f} s "
    text += f"(recorded: {report.recorded_seconds:.1f} s); {report.num_checked} blocks compared, "
    text += f"{report.num_audited} of them read back at the end"
    console.print(text)
    if report.num_seeded:
        console.print(f"{report.num_seeded} objects were stored beforehand: the recording had them")
    if report.num_removed:
        console.print(f"{report.num_removed} objects of this run were removed from Mooncake")
    style = "green" if not report.differences else "bold red"
    text = f"{report.num_same} outcomes as recorded, {len(report.differences)} not"
    console.print(Text(text, style=style))
    for line in report.differences[:50]:
        console.print(Text(clean(f"  {line}")))
    for line in report.faults:
        console.print(Text(clean(line), style="bold red"))
    if report.num_faults > len(report.faults):
        console.print(f"and {report.num_faults - len(report.faults)} more")
    if not report.is_sound:
        console.print(Text("the logs of this run break a rule: keep them with --out, then verify"))
    for line in report.notes:
        console.print(Text(clean(line), style="yellow"))
    console.print()
    _print_rows(console, report.rows, ("recorded", "now"))


def _print_rows(console: Console, rows: Sequence[Row], names: tuple[str, str]) -> None:
    table = new_table("", *names, "change")
    for row in rows:
        change = "" if row.change is None or row.a == row.b else f"{row.change:+.0%}"
        table.add_row(clean(row.name), row.text_a, row.text_b, change)
    console.print(table)
