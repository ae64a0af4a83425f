"""Histories as tests: what was recorded once is decided the same way today, and told the same way.

``record.py`` in this folder makes them anew.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvreplay.loading import open_logs
from kvreplay.verify import CORES, Result, replay
from tests.histories.saying import says
from tests.histories.scenes_plain import SCENES

HERE = Path(__file__).parent
#: Packages without which a log must be readable, checkable and replayable.
HEAVY = ("torch", "vllm", "mooncake", "zmq", "numpy", "matplotlib")


def histories(*kinds: str) -> list[Path]:
    return sorted(path for kind in kinds for path in (HERE / kind).iterdir())


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def test_there_are_histories_of_every_kind() -> None:
    assert len(histories("real")) >= 30
    assert len(histories("faults")) >= 12
    assert len(histories("violations")) >= 8


@pytest.mark.parametrize("path", histories("real", "faults", "violations"), ids=name)
def test_a_history_says_what_it_said(path: Path) -> None:
    expected = json.loads((path / "expected.json").read_text("utf-8"))
    assert says(path) == expected
    if path.parent.name == "violations":
        assert expected["status"] == 1
        assert expected["rules"]
    else:
        assert expected["status"] == 0
        assert expected["requests"]


@pytest.mark.parametrize("path", histories("real"), ids=name)
def test_a_real_run_replays_the_same_every_time(path: Path) -> None:
    logs = open_logs([path]).logs
    assert {log.header.core for log in logs} == {"kvsched", "kvworker"}
    for _ in range(100 if path.name in SCENES else 10):
        for log in logs:
            found = replay(log, CORES[log.header.core])
            assert found.result is Result.SAME, found
            assert found.num_records > 5


def test_no_heavy_package_is_needed() -> None:
    """Neither to check, nor to replay, nor to tell: none of them can be imported here."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {HEAVY}:\n"
        "            raise ImportError(f'{name} is not here')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from kvreplay.cli import app\n"
        "app(sys.argv[1:], standalone_mode=True)\n"
    )
    root = HERE.parents[1]
    path = os.pathsep.join(str(root / part) for part in ("", "common", "tools"))
    for command in (["verify"], ["stats"], ["stats", "--quick"], ["show"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *command[:1], str(HERE / "real" / "layerwise"),
             *command[1:]],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
