"""Fifty engines that crash under one daemon: it does not grow."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.support.daemonproc import DaemonProcess, daemon, environment

CYCLES = 50
PATIENCE_S = 30.0
#: What allocators may keep: far less than fifty engines' mappings.
SLACK_BYTES = 16 << 20
_FAKE_MODEL = Path(__file__).parents[1] / "support" / "fakemodel.py"


def crash_one(running: DaemonProcess, number: int) -> int:
    """An engine attaches and is killed; returns the inode of its memory."""
    process = subprocess.Popen(
        [sys.executable, str(_FAKE_MODEL), running.endpoint, f"engine-{number}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    inode = int(process.stdout.readline())
    assert running.has_mapped(inode)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + PATIENCE_S
    while running.has_mapped(inode):
        assert time.monotonic() < deadline, "the memory of a dead engine stays mapped"
        time.sleep(0.005)
    return inode


def test_fifty_engines_crash_under_one_daemon() -> None:
    with daemon() as running:
        watched = psutil.Process(running.pid)
        for number in range(5):
            crash_one(running, number)
        fds, size = watched.num_fds(), watched.memory_info().rss
        maps = len(running.maps.splitlines())
        for number in range(5, 5 + CYCLES):
            crash_one(running, number)
        assert watched.num_fds() <= fds
        # Arenas of threads come and go by a few.
        assert len(running.maps.splitlines()) <= maps + 8
        assert watched.memory_info().rss <= size + SLACK_BYTES
        assert running.status().metrics["kvferry_engines_attached"] == 0
