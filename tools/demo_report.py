"""What the demo found: the table, and what is wrong with it."""

import dataclasses
import json
import shutil
from pathlib import Path

from rich.table import Table

import dialogue
from dialogue import Turn

#: What a run leaves in the output folder, and the next one removes. The model stays.
OUTPUTS = ("logs", "trace.json", "overlap.png", "mooncake.json")


@dataclasses.dataclass
class Results:
    """Everything that was found, by dialogue."""

    #: The dialogue without a connector.
    reference: list[Turn] = dataclasses.field(default_factory=list)
    turns: dict[str, list[Turn]] = dataclasses.field(default_factory=dict)
    #: The first turn behind another system prompt.
    control: Turn | None = None
    #: What went wrong besides the answers.
    wrong: list[str] = dataclasses.field(default_factory=list)

    def add(self, name: str, turns: list[Turn]) -> None:
        """Keep one dialogue."""
        self.turns[name] = turns


def clean(out: Path) -> None:
    """Make the output folder, without what an earlier run left."""
    out.mkdir(parents=True, exist_ok=True)
    for name in OUTPUTS:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for log in out.glob("*.log"):
        log.unlink()


def write_mooncake_config(out: Path, master: str, segment_bytes: int) -> Path:
    """Write the ``mooncake.json`` of this ecosystem."""
    path = out / "mooncake.json"
    content = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "global_segment_size": segment_bytes,
        "local_buffer_size": "256MiB",
        "protocol": "tcp",
        "device_name": "",
    }
    path.write_text(json.dumps(content, indent=2), "utf-8")
    return path


def table(results: Results) -> Table:
    """Return the table of all turns."""
    found = Table(title="One dialogue, three turns, five times")
    found.add_column("dialogue")
    columns = ("turn", "prompt tokens", "local", "external", "first token", "text", "logprobs")
    for column in columns:
        found.add_column(column, justify="right")
    for name, turns in results.turns.items():
        for number, turn in enumerate(turns):
            reference = results.reference[number]
            cells = _equality(turn, reference) if turns is not results.reference else ("-", "-")
            found.add_row(name if not number else "", str(number + 1), *_numbers(turn), *cells)
        found.add_section()
    if results.control is not None:
        cells = _equality(results.control, results.reference[0])
        found.add_row("control: other prompt", "1", *_numbers(results.control), *cells)
    return found


def _numbers(turn: Turn) -> tuple[str, str, str, str]:
    return (
        str(turn.reply.num_prompt_tokens),
        str(turn.num_local),
        str(turn.num_external),
        f"{turn.reply.first_token_s * 1000:.0f} ms",
    )


def _equality(turn: Turn, reference: Turn) -> tuple[str, str]:
    text = "equal" if turn.reply.text == reference.reply.text else "differs"
    gap = dialogue.largest_gap(turn, reference)
    return text, "differ" if gap == float("inf") else f"±{gap:.0e}" if gap else "equal"


def problems(results: Results) -> list[str]:
    """Say everything that is not as it must be; empty if all is well."""
    wrong = list(results.wrong)
    for name, turns in results.turns.items():
        for number, (turn, reference) in enumerate(zip(turns, results.reference, strict=True)):
            if not dialogue.is_same(turn, reference):
                gap = dialogue.largest_gap(turn, reference)
                wrong.append(
                    f"{name}, turn {number + 1}: {turn.reply.text!r}, not "
                    f"{reference.reply.text!r} (logprobs differ by {gap:.2g})"
                )
            reuse = _reuse_problem(name, number, turn)
            if reuse:
                wrong.append(f"{name}, turn {number + 1}: {reuse}")
    if results.control is None or dialogue.is_same(results.control, results.reference[0]):
        wrong.append("control: another system prompt gave the same answer: nothing was compared")
    return wrong


def _reuse_problem(name: str, number: int, turn: Turn) -> str:
    """Say where a turn took its prefix from, if that is not where it should."""
    full, external, local = turn.num_cacheable, turn.num_external, turn.num_local
    if name in {"vLLM alone", "cold"}:
        return f"{external} tokens came from the store, not 0" if external else ""
    if name == "local hit":
        return f"{local} tokens came from the local cache, not {full}" if local != full else ""
    if external + local != full:
        return f"{external + local} tokens came from a cache, not {full}"
    if name == "external hit" or number == 0:
        return f"{local} tokens came from the local cache, not 0" if local else ""
    return ""
