import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvcommon.errors import ConfigError
from kvworker.descriptor import read_descriptor
from kvworker.supervisor import Child, parse_devices, sweep
from tests.support.daemonproc import environment

PATIENCE_S = 40.0


def test_ranges_and_lists_of_devices() -> None:
    assert parse_devices("npu:0-3", {}) == ["npu:0", "npu:1", "npu:2", "npu:3"]
    assert parse_devices("cpu:0, cpu:1", {}) == ["cpu:0", "cpu:1"]


def test_only_the_cards_that_the_environment_shows() -> None:
    environ = {"ASCEND_RT_VISIBLE_DEVICES": "5,1"}
    assert parse_devices("npu:0-7", environ) == ["npu:1", "npu:5"]
    assert parse_devices("cpu:0-1", environ) == ["cpu:0", "cpu:1"]
    with pytest.raises(ConfigError, match="no device to serve"):
        parse_devices("npu:2-3", environ)


@pytest.mark.parametrize("text", ["", "npu", "npu:3-1", "cpu:0,cpu:0", "cpu:0;cpu:1"])
def test_what_is_no_list_of_devices(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_devices(text, {})


def test_sockets_of_the_dead_are_swept(tmp_path: Path) -> None:
    dead, alive = tmp_path / "in-a-0-1.sock", tmp_path / "in-b-0-2.sock"
    other = tmp_path / "cpu-0.sock"
    for path in (dead, other):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(path))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(alive))
        listening.listen()
        assert sweep(tmp_path) == [dead.name]
    assert alive.exists()
    assert other.exists()


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Node:
    """``kvworker up`` for two devices."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "kvworker", "up", "--devices", "cpu:0,cpu:1"]
        command += ["--run-dir", str(directory), "--", "--store", "memory"]
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment())

    def pid_of(self, index: int) -> int:
        found = read_descriptor(self.directory / f"cpu-{index}.json")
        return found.pid if found is not None and psutil.pid_exists(found.pid) else 0

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text("utf-8", errors="replace")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    tmp_path.chmod(0o700)
    running = Node(tmp_path)
    try:
        wait_for(lambda: all(running.pid_of(index) for index in (0, 1)))
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait(PATIENCE_S)
        wait_for(lambda: not any(running.pid_of(index) for index in (0, 1)))


def test_a_daemon_that_dies_is_started_again_and_the_others_stay(node: Node) -> None:
    first, second = node.pid_of(0), node.pid_of(1)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: node.pid_of(0) not in {0, first})
    assert node.pid_of(1) == second
    assert "signal 9" in node.log
    node.process.terminate()
    assert node.process.wait(PATIENCE_S) == 0
    # In reverse order, and nothing is left.
    stopped = [line for line in node.log.splitlines() if "stopped (status 0)" in line]
    assert ["cpu:1" in stopped[0], "cpu:0" in stopped[1]] == [True, True]
    assert not list(node.directory.glob("*.sock"))


def test_sighup_starts_every_daemon_anew_after_a_clean_stop(node: Node) -> None:
    before = node.pid_of(0), node.pid_of(1)
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: all(node.pid_of(i) not in {0, before[i]} for i in (0, 1)))
    assert node.log.count("ended (status 0)") == 2


def test_a_daemon_that_cannot_be_started_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    child = Child("cpu:0", ["/nonexistent/python"])
    child.start()
    assert child.process is None
    assert child.due > time.monotonic()
    assert "cannot start a daemon" in caplog.text
    child.stop()


def test_daemons_end_with_a_supervisor_that_was_killed(node: Node) -> None:
    node.process.kill()
    node.process.wait(PATIENCE_S)
    wait_for(lambda: not any(node.pid_of(index) for index in (0, 1)))


def test_what_serve_does_not_understand_is_said_and_tried_again_rarely(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvworker", "up", "--devices", "cpu:x"]
    done = subprocess.run(command, env=environment(), capture_output=True, check=False)
    assert done.returncode == 2
    assert b"'cpu:x' is no device" in done.stderr
