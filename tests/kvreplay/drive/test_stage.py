"""What a run is played on: daemons begin and end, and every wait is bounded."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvreplay.drive.daemon import Daemon
from kvreplay.drive.errors import DriveError
from kvreplay.drive.stage import Options, Stage
from kvreplay.loading import LogSet, open_logs

HISTORIES = Path(__file__).parents[2] / "histories" / "real"


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvr") as name:
        yield Path(name)


@pytest.fixture
def logs() -> LogSet:
    found = open_logs([HISTORIES / "daemon-killed"])
    return LogSet([log for log in found.logs if log.header.core == "kvworker"], [])


def test_the_next_daemon_of_a_device_takes_the_place_of_the_one_before(
    logs: LogSet, short: Path
) -> None:
    first, second = (log.label for log in logs.logs)
    stage = Stage(logs.logs, Options(directory=short))
    try:
        stage.start(first)
        old = stage.daemons[first].pid
        stage.start(second)
        assert not psutil.pid_exists(old)
        assert stage.daemons[first].pid == 0
        assert stage.daemons[second].pid
        stage.end(first)
    finally:
        stage.close()
    assert stage.daemons[second].pid == 0


def test_a_daemon_is_ended_as_it_ended(
    logs: LogSet, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = []
    label = logs.logs[0].label

    class Watched(Daemon):
        def end(self, how: str) -> None:
            process = self._process
            getattr(super(), how)()
            if process is not None:
                codes.append(process.returncode)

        def kill(self) -> None:
            self.end("kill")

        def stop(self) -> None:
            self.end("stop")

    monkeypatch.setattr("kvreplay.drive.stage.Daemon", Watched)
    for killed in (True, False):
        stage = Stage(logs.logs, Options(directory=short))
        try:
            stage.start(label)
            stage.end(label, killed=killed)
        finally:
            stage.close()
    assert codes == [-signal.SIGKILL, 0]


def test_waits_are_bounded(logs: LogSet, short: Path) -> None:
    stage = Stage(logs.logs, Options(directory=short, answer_s=0.0, limit_s=60.0))
    try:
        assert stage.wait_for(lambda: True, 0.0)
        assert not stage.wait_for(lambda: False, 0.0)
        stage.wait(lambda: False, "nothing comes")
        assert stage.tally.faults == ["nothing comes after 0 s"]
        assert 0 < stage.left_s <= 60
        stage.grant(100)
        assert stage.left_s > 60
    finally:
        stage.close()
    late = Stage(logs.logs, Options(directory=short, limit_s=-1.0))
    with pytest.raises(DriveError, match="longer than"):
        late.listen(0.0)
    assert late.left_s == 0
    late.close()


def test_a_daemon_that_dies_by_itself_ends_the_run(logs: LogSet, short: Path) -> None:
    label = logs.logs[0].label
    stage = Stage(logs.logs, Options(directory=short))
    try:
        stage.start(label)
        pid = stage.daemons[label].pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DriveError, match="has ended"):
            stage.wait_for(lambda: False, 10)
    finally:
        stage.close()
