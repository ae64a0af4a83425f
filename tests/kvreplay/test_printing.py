"""Printing: safe for a terminal, one line each."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvreplay import printing
from kvreplay.loading import open_logs
from kvreplay.scan import scan
from kvreplay.stats import gather
from kvreplay.story import tell
from kvreplay.verify import verify
from kvworker.core.commands import FindKeys
from tests.kvreplay import scenes
from tests.kvreplay.pair import Pair


def text_of(scene: scenes.Scene, name: str) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False, markup=False, soft_wrap=True)
    logs = scene.close()
    if name == "story":
        printing.print_story(console, tell(logs, scenes.REQUEST))
    elif name == "counts":
        printing.print_counts(console, gather(logs))
    else:
        printing.print_verdict(console, verify(logs))
    return out.getvalue()


def test_control_sequences_do_not_pass() -> None:
    assert printing.clean("a\x1b[31mb\x9b") == "a?[31mb?"


def test_a_line_of_a_log_does_not_pass_for_one_of_ours() -> None:
    lines = printing.clean("x\nrules: none is broken").splitlines()
    assert lines == ["x", "    | rules: none is broken"]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("story", ["→ tells rank 0: lookup 7", "← kvsched-1:1", "+0.000 ms", "took 64 tokens"]),
        ("counts", ["answer to vLLM", "load job", "LoadLayers", "p95 ms"]),
        ("verdict", ["rules: none is broken", "not-replayed"]),
    ],
)
def test_what_is_said(tmp_path: Path, name: str, texts: list[str]) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    said = text_of(scene, name)
    for text in texts:
        assert text in said, said


def test_problems_are_named_by_log() -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    printing.print_problems(console, {"s": ["record 3 is odd"]}, ["x.kvlog: not a log"])
    assert out.getvalue().splitlines() == ["s: record 3 is odd", "x.kvlog: not a log"]


def test_files_are_named_for_people_and_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    printing.say_written(Path("t.json"), {"events": 3}, as_json=False)
    printing.say_written(Path("t.json"), {"events": 3}, as_json=True)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "t.json: 3 events"
    assert json.loads(second) == {"file": "t.json", "events": 3}


def test_a_verdict_lists_differences(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.spoil_worker = lambda _event, commands: [
        command for command in commands if not isinstance(command, FindKeys)
    ]
    pair.add("req", 100, "a")
    pair.close()
    out = io.StringIO()
    console = Console(file=out, width=200)
    printing.print_verdict(console, verify(open_logs([tmp_path])))
    for text in ("kvworker-cpu-0: different", "recorded:", "nothing", "→ op 2: look for 6 objects"):
        assert text in out.getvalue(), out.getvalue()


def test_counts_of_a_quick_look(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    out = io.StringIO()
    printing.print_summary(Console(file=out, width=120), scan(scene.close()))
    assert "LookupAnswered" in out.getvalue()
    assert "14 of 14 records" in out.getvalue()
