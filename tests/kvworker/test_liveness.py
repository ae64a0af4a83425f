"""A process's death is seen through its pidfd."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvworker.liveness import ProcessWatch


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_death_is_seen_once(child: "subprocess.Popen[bytes]") -> None:
    before = open_fds()
    poller = zmq.Poller()
    watch = ProcessWatch(poller)
    assert watch.watch("model", child.pid)
    assert watch.names == {"model"}
    assert poller.poll(0) == []
    child.kill()
    [(fd, _)] = poller.poll(10_000)
    assert isinstance(fd, int)
    assert watch.ended(fd) == "model"
    assert watch.ended(fd) is None
    assert poller.poll(0) == []
    assert open_fds() == before


def test_other_descriptors_are_not_processes() -> None:
    assert ProcessWatch(zmq.Poller()).ended(0) is None


@pytest.mark.parametrize("pid", [0, -1])
def test_no_pid_cannot_be_watched(pid: int) -> None:
    watch = ProcessWatch(zmq.Poller())
    assert not watch.watch("scheduler", pid)
    assert not watch.names


def test_a_pid_that_does_not_exist_here_cannot_be_watched(
    child: "subprocess.Popen[bytes]",
) -> None:
    child.kill()
    child.wait()
    assert not ProcessWatch(zmq.Poller()).watch("model", child.pid)


def test_watching_again_replaces(child: "subprocess.Popen[bytes]") -> None:
    before = open_fds()
    poller = zmq.Poller()
    watch = ProcessWatch(poller)
    assert watch.watch("model", child.pid)
    assert watch.watch("model", os.getpid())
    child.kill()
    child.wait()
    assert poller.poll(0) == []
    watch.close()
    assert open_fds() == before
