"""What chaos may remove from /dev/shm, and when a survivor has grown."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.chaos import leftovers
from tests.chaos.leftovers import SHM, Sample, Shm, Survivor

MAKE_LOCK = """
import multiprocessing, sys
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
sys.stdin.read()
"""


@contextmanager
def process_with_a_lock() -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE_LOCK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            name = "sem." + process.stdout.readline().strip().lstrip("/")
            yield name, process
        finally:
            process.kill()


def test_what_a_running_process_needs_stays_though_it_made_it_under_another_name() -> None:
    shm = Shm()
    with process_with_a_lock() as (name, process):
        assert (SHM / name).exists()
        assert shm.sweep() == []
        assert (SHM / name).exists()
        process.kill()
        process.wait()
        shm.sweep()
        assert not (SHM / name).exists()


def test_a_file_of_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.0)
    shm = Shm()
    path = SHM / "kvferry-test-of-leftovers"
    path.touch()
    try:
        assert path.name in shm.sweep()
        assert path.exists()
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        (Sample(100.0, 30, 300), None),
        (Sample(130.0, 30, 300), "rss_mb"),
        (Sample(100.0, 40, 300), "fds"),
        (Sample(100.0, 30, 340), "maps"),
    ],
)
def test_growth_is_noticed(last: Sample, problem: str | None) -> None:
    survivor = Survivor("daemon")
    survivor.samples = [Sample(50.0, 20, 200)] * 5 + [Sample(100.0, 30, 300)] * 10 + [last] * 3
    assert [each.split()[1] for each in survivor.problems] == ([problem] if problem else [])
