"""The short form of chaos: one moment of a few kinds. The long form is ``make chaos``."""

from pathlib import Path

import pytest

from tests.chaos.chaos import Chaos

KINDS = [
    "daemon kill -9",
    "daemon frozen",
    "master kill -9",
    "engine core kill -9",
    "worker frozen",
]


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_moment_of_each_kind(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, seed=1)
    chaos.run(1, KINDS)
    assert chaos.table.verdict == []
    assert sorted(chaos.table.rows) == sorted(KINDS)
    assert all(row.moments == 1 and row.requests > 0 for row in chaos.table.rows.values())


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown kinds: \['demon'\]; there are: daemon kill -9,"):
        Chaos(tmp_path, seed=1).run(1, ["demon"])
