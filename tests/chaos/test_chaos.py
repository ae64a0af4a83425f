"""The short form of chaos: one moment of a few kinds. The long form is ``make chaos``."""

from pathlib import Path

import pytest

from tests.chaos.chaos import Chaos

KINDS = ["daemon kill -9", "daemon frozen", "master kill -9"]


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_moment_of_each_kind(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, seed=1)
    chaos.run(1, KINDS)
    assert chaos.verdict == []
    assert sorted(chaos.rows) == sorted(KINDS)
    assert all(row["requests"] > 0 for row in chaos.rows.values())
