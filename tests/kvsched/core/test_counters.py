"""Every counter of the core is on the page that people read."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_each_counter_is_documented() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8").split("## Of the scheduler side")[1]
    named = set(re.findall(r"`([a-z_]+)[`.]", page))
    counted = {
        name
        for source in (ROOT / "kvsched" / "core").glob("*.py")
        for name in re.findall(r'counters\[f?"([a-z_]+)', source.read_text("utf-8"))
    }
    assert counted
    assert counted <= named
