"""The commands, from the outside."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from kvcommon.eventlog import LogWriter, Recorder, make_header
from kvreplay.cli import app
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvsched.core.core import CoreConfig, SchedCore
from kvsched.core.events import MatchAsked
from tests.kvreplay import scenes


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    scene = scenes.Scene(tmp_path / "logs")
    scenes.failed_load(scene)
    scenes.save(scene, tainted=True, publish=False)
    scene.close()
    return tmp_path / "logs"


def test_story_ends_with_its_sentence(logs: Path) -> None:
    result = run("story", logs, "req-a")
    assert result.exit_code == 0
    last = result.stdout.strip().splitlines()[-1]
    assert last.startswith("Request req-abc")
    assert "(23-24) failed on rank 0" in last
    assert json.loads(run("story", logs, "req-a", "--json").stdout)["sentence"] == last


def test_show_filters_and_prints_json_lines(logs: Path) -> None:
    result = run("show", logs, "--job", "11")
    assert "the plan of step 5" in result.stdout
    assert "step 6" not in result.stdout
    rows = [json.loads(row) for row in run("show", logs, "--json").stdout.splitlines()]
    assert len(rows) == 24
    assert run("show", logs, "--request", "nobody").exit_code == 2


def test_stats(logs: Path) -> None:
    result = run("stats", logs)
    assert result.exit_code == 0
    assert "transfer-failed" in result.stdout
    assert json.loads(run("stats", logs, "--json").stdout)["requests"] == 1
    quick = run("stats", logs, "--quick", "--kind", "LoadLayers", "--json")
    assert json.loads(quick.stdout)["wanted"] == 1
    assert "MatchAsked" in run("stats", logs, "--quick", "--from", "0.001", "--to", "9").stdout


def test_trace_and_plot_write_files(logs: Path, tmp_path: Path) -> None:
    assert run("trace", logs, "-o", tmp_path / "t.json").exit_code == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    result = run("plot", logs, "-o", tmp_path / "o.png", "--json")
    assert json.loads(result.stdout)["steps"] == 2
    assert (tmp_path / "o.png").stat().st_size > 1000
    assert run("trace", logs, "-o", tmp_path / "none" / "t.json").exit_code == 2
    result = run("report", logs, "-o", tmp_path / "r.html", "--json")
    assert json.loads(result.stdout)["bytes"] > 10_000
    assert "req-abc" in (tmp_path / "r.html").read_text("utf-8")


def test_verify_shows_difference_and_story(logs: Path) -> None:
    """The scene's commands are made up, so the real core answers something else."""
    result = run("verify", logs)
    assert result.exit_code == 1
    for text in ("recorded:", "replayed:", "The story of req-abc", "Request req-abc was to take"):
        assert text in result.stdout
    found = json.loads(run("verify", logs, "--json").stdout)
    assert found["status"] == 1
    assert found["story"]["request"] == "req-abc"


def test_verify_of_a_right_log(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, make_header("kvsched", "s", 1, CoreConfig(), versions={}))
    core = Recorder(SchedCore(CoreConfig()), writer, "s")
    core.handle(MatchAsked(now_ns=1, request_id="r", num_tokens=9, num_local_tokens=0))
    writer.close()
    result = run("verify", tmp_path)
    assert result.exit_code == 0, result.stdout
    assert "s: same, 1 records replayed" in result.stdout


@pytest.mark.parametrize("command", ["show", "stats", "verify", "trace", "plot"])
def test_what_is_no_log_is_said_in_one_line(tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith("kvreplay: ")
    assert "no event logs" in result.stderr


def test_a_log_cannot_send_control_sequences_to_the_terminal(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    evil = "evil\x1b]0;x\x07"
    scene.sched(
        sched.MatchAsked(now_ns=scene.tick(), request_id=evil, num_tokens=1, num_local_tokens=0),
        sched_do.AnswerMatch(request_id=evil, num_tokens=0, reason="\x1b[31m"),
    )
    scene.sched(sched.DaemonLost(now_ns=scene.tick(), rank=0, dead=True, reason="\x1b[2J"))
    scene.close()
    for args in (["story", tmp_path, "evil"], ["show", tmp_path], ["stats", tmp_path]):
        result = run(*args)
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout


def mutate(value: Any, rng: random.Random) -> Any:
    """Change about one value in ten into something extreme of the same kind."""
    if isinstance(value, dict):
        return {key: one if key == "type" else mutate(one, rng) for key, one in value.items()}
    if isinstance(value, list):
        kept = [mutate(one, rng) for one in value if rng.random() > 0.05]
        return kept * (50 if rng.random() < 0.03 else 1)
    if rng.random() > 0.1 or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return rng.choice([0, 1, -1, 7, -(2**63), 2**63 - 1, 2**64 - 1])
    if isinstance(value, str):
        return rng.choice(["", "#", "x#1", "\x1b[2J", "-" * 500, "kvsched-1:1", "req-abc"])
    return rng.randbytes(3) if isinstance(value, bytes) else value


def test_no_command_breaks_on_a_malformed_log(tmp_path: Path) -> None:
    """Logs of which the frames are right and the values are not."""
    scene = scenes.Scene(tmp_path / "good")
    scenes.failed_load(scene)
    scenes.save(scene, tainted=True, publish=False)
    good = scene.close()
    rng = random.Random(11)
    for turn in range(25):
        folder = tmp_path / str(turn)
        for log in good.logs:
            writer = LogWriter(folder, log.header)
            for entry in log:
                event, commands = (
                    mutate(msgspec.msgpack.decode(raw), rng)
                    for raw in (entry.raw.event, entry.raw.commands)
                )
                cause = mutate(entry.cause, rng)
                writer.record(rng.choice([entry.seq, 0, 5]), cause, event, commands)
            writer.close()
        picture = folder / "x.png"
        for args in (
            ["show", folder],
            ["show", folder, "--json", "--step", 5],
            ["stats", folder],
            ["story", folder, "req-abc"],
            ["verify", folder],
            ["trace", folder, "-o", folder / "t.json"],
            *([["plot", folder, "-o", picture]] if turn % 10 == 0 else []),
        ):
            result = run(*args)
            assert result.exception is None or isinstance(result.exception, SystemExit), args
            assert result.exit_code in {0, 1, 2}


def test_kvreplay_needs_no_heavy_package() -> None:
    """Also replay itself: the cores import none of them."""
    code = (
        "import sys, kvreplay.cli, kvsched.core.core, kvworker.core.core\n"
        "heavy = {'torch', 'vllm', 'mooncake', 'zmq', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join(str(root / part) for part in ("", "common", "tools"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
