"""Rings are written when somebody asks: by the command, and by a signal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcommon.errors import ConfigError
from kvcommon.eventlog import read_log
from kvworker.dump import write_logs
from tests.support.client import Client
from tests.support.daemonproc import command, daemon, environment
from tests.support.engine import attach
from tests.support.fakemodel import FakeModel


def test_without_a_log_or_a_ring_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps no event log"):
        write_logs("", 0.1)
    with pytest.raises(ConfigError, match="no log was written"):
        write_logs(str(tmp_path), 0.1)
    with pytest.raises(ConfigError, match="event log"):
        write_logs(str(tmp_path / "none"), 0.1)


HOLD = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_file_that_is_being_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only begun when time is up; complete once its writer lets go of it, or has died."""
    hidden, path = tmp_path / "hidden", tmp_path / "w-1.0.kvlog"
    hidden.write_bytes(b"kvflog")
    monkeypatch.setattr("kvworker.dump.ask_for_dumps", lambda _directory: hidden.rename(path))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(hidden)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=r"only begun: w-1\.0\.kvlog"):
            write_logs(str(tmp_path), 0.1)
        writer.kill()
    path.rename(hidden)
    assert write_logs(str(tmp_path), 0.1) == [path]


def test_a_daemons_ring_is_written_by_command_and_by_signal(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    options = ("--event-log", str(logs), "--event-log-mode", "ring", "--event-log-ring-s", "600")
    with daemon(*options) as running:
        model = FakeModel()
        with Client(running.endpoint, "scheduler") as scheduler, Client(
            running.endpoint, "model"
        ) as control:
            attach(control, scheduler, model)
            assert list(logs.iterdir()) == []
            done = subprocess.run(
                command("dump", "--device", "cpu:0", "--run-dir", str(running.directory)),
                env=environment(), capture_output=True, text=True, check=False,
            )
            assert done.returncode == 0, done.stderr
            (path,) = map(Path, done.stdout.split())
            kinds = [bytes(record.event) for record in read_log(path)]
            assert any(b"SchedulerSaid" in event for event in kinds)
            before = set(logs.iterdir())
            os.kill(running.pid, signal.SIGUSR1)
            new = write_after(logs, before)
            assert read_log(new).header.part == 1
        model.close()


def write_after(logs: Path, before: set[Path]) -> Path:
    """Ask again until the next part is there: the signal's and ours may be one dump or two."""
    found = sorted(set(write_logs(str(logs), 20.0)) - before)
    return min(set(logs.glob("*.kvlog")) - before, default=found[0])
