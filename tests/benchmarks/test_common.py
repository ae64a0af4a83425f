"""Timings are summarised rightly, and a busy machine is seen."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import common


def test_summary() -> None:
    assert common.summarise([3.0, 1.0, 2.0]) == common.Summary(2.0, 1.0, 3.0, 3)
    assert common.summarise([3.0, 1.0, 2.0]).text() == "2.0 (1.0-3.0)"
    assert common.summarise([]).count == 0


def test_quiet_is_below_the_limit() -> None:
    assert common.CpuUse(1.9, common.QUIET_CORES - 0.01, 1.0).quiet
    assert not common.CpuUse(0.0, common.QUIET_CORES, 1.0).quiet


def test_our_children_are_not_foreign() -> None:
    meter = common.CpuMeter()
    code = "import time\nwhile time.process_time() < 0.6: pass\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        # It waits for its input with half a second of CPU spent, so that it still is our child.
        assert child.stdin is not None
        while sum(psutil.Process(child.pid).cpu_times()[:2]) < 0.5:
            pass
        use = meter.read()
        child.stdin.write(b"\n")
    assert use.ours * use.wall_s >= 0.5


def test_metered_covers_a_window() -> None:
    found: list[common.CpuUse] = []
    with common.metered(found):
        pass
    assert found[0].wall_s >= common.WINDOW_S


def test_patience_ends() -> None:
    patience = common.Patience(0)
    # Returns, however busy the machine is.
    patience.settle()
    with patience.retrying():
        pass
    assert patience.left_s < 0


def test_json_says_where_it_was_measured(tmp_path: Path) -> None:
    path = common.write_json("x", {"answer": 1}, tmp_path / "new")
    content = json.loads(path.read_text())
    assert content["answer"] == 1
    assert content["machine"]["cores"]
    assert len(content["commit"]["hash"]) == 40


@pytest.mark.parametrize("name", ["cpu", "python", "versions", "memory_bytes"])
def test_machine(name: str) -> None:
    assert common.machine()[name]
