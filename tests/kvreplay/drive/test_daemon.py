"""The daemon's process: started, watched, ended."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvreplay.drive.daemon import Daemon
from kvreplay.drive.errors import DriveError


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvr") as name:
        yield Path(name)


def test_it_serves_and_is_gone_afterwards(short: Path) -> None:
    with Daemon(short, "cpu:0", ["--store", "memory"]) as daemon:
        pid = daemon.pid
        daemon.check()
        assert Path(daemon.endpoint.removeprefix("ipc://")).is_socket()
    assert not psutil.pid_exists(pid)
    assert daemon.pid == 0
    daemon.stop()


def test_one_that_dies_is_noticed_with_its_last_words(short: Path) -> None:
    with Daemon(short, "cpu:0", ["--store", "memory"]) as daemon:
        os.kill(daemon.pid, signal.SIGKILL)
        psutil.Process(daemon.pid).wait(10)
        with pytest.raises(DriveError, match="has ended") as caught:
            daemon.check()
    assert "ready: cpu:0" in str(caught.value)


def test_one_that_does_not_start_is_said(short: Path) -> None:
    program = (sys.executable, "-c", "import sys; sys.exit('out of order')")
    with pytest.raises(DriveError, match="out of order"):
        Daemon(short, "cpu:0", [], program).__enter__()
