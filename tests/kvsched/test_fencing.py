"""Killing a frozen daemon: only the process that surely is the daemon, and by its descriptor."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import zmq

from kvcommon.ids import EngineId, Epoch
from kvcommon.messages import Hello, Welcome
from kvsched.core.events import DaemonLost, DaemonReady, FenceFailed, SchedEvent
from kvsched.link import DaemonLink, ProcessWatch
from kvsched.ranks import RankInfo, Ranks
from tests.support.daemonproc import DaemonProcess, command, environment
from tests.support.fakedaemon import FakeDaemon

PATIENCE_S = 30


def start(directory: Path) -> DaemonProcess:
    with (directory / "stderr.log").open("wb") as log:
        process = subprocess.Popen(
            command("serve", "--device", "cpu:0", "--run-dir", str(directory), "--store", "memory"),
            stderr=log,
            env=environment(),
        )
    daemon = DaemonProcess(directory, "cpu:0", process)
    daemon.wait_ready()
    return daemon


class Listener:
    """The scheduler side's conversation with one daemon."""

    def __init__(self, endpoint: str, *, may_kill: bool = True, patience_ms: int = 0) -> None:
        self.events: list[SchedEvent] = []
        info = RankInfo(
            rank=0,
            endpoint=endpoint,
            device="cpu:0",
            fingerprint="f",
            object_bytes=1,
            block_size=1,
            num_blocks=2,
        )
        self.ranks = Ranks(
            zmq.Context.instance(),
            EngineId("e"),
            Epoch(7),
            [info],
            emit=lambda event, _: self.events.append(event),
            open_jobs=lambda _: (),
            heartbeat_ms=100,
            on_welcome=self._welcome,
            may_kill=lambda link, pid: may_kill and self._is_it(link, pid),
            patience_ns=lambda _: patience_ms * 1_000_000,
        )
        self.pid = 0

    def _welcome(self, welcome: Welcome) -> None:
        self.pid = welcome.pid

    @staticmethod
    def _is_it(link: DaemonLink, pid: int) -> bool:
        return link.peer_pid == pid

    def silences(self) -> tuple[int, int]:
        """How long the daemon has been silent, ms, and how much of it counts."""
        self.ranks.poll()
        counted = self.ranks.silences()
        return self.ranks._ranks[0].silence.total_ns // 1_000_000, counted[0][1] if counted else 0

    def wait_for(self, kind: type[SchedEvent]) -> SchedEvent:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.ranks.poll()
            for event in self.events:
                if isinstance(event, kind):
                    return event
            assert time.monotonic() < deadline, self.events
            self.ranks.wait(0, 20)


def test_a_frozen_daemon_is_known_by_the_kernel_and_killed(tmp_path: Path) -> None:
    daemon = start(tmp_path)
    listener = Listener(daemon.endpoint)
    try:
        listener.wait_for(DaemonReady)
        daemon.process.send_signal(signal.SIGSTOP)
        while not listener.ranks.silences():
            listener.ranks.poll()
            listener.ranks.wait(0, 20)
        listener.ranks.fence(0)
        assert daemon.process.wait(PATIENCE_S) == -signal.SIGKILL
        lost = listener.wait_for(DaemonLost)
        while not (isinstance(lost, DaemonLost) and lost.dead):
            listener.events.clear()
            lost = listener.wait_for(DaemonLost)
    finally:
        listener.ranks.close()
        daemon.process.kill()
        daemon.process.wait()


def test_a_frozen_daemon_is_not_excused(tmp_path: Path) -> None:
    daemon = start(tmp_path)
    listener = Listener(daemon.endpoint, patience_ms=60_000)
    try:
        listener.wait_for(DaemonReady)
        daemon.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, daemon.pid, os.WSTOPPED | os.WNOWAIT)
        total = 0
        while total < 1000:
            total, counted = listener.silences()
            assert counted in {0, total}
            listener.ranks.wait(0, 20)
    finally:
        listener.ranks.close()
        daemon.process.kill()
        daemon.process.wait()


def test_a_daemon_that_is_busy_is_excused_for_a_while() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    with FakeDaemon() as daemon:
        listener = Listener(daemon.endpoint, patience_ms=300)
        try:
            daemon.hear(Hello)
            daemon.welcome(pid=busy.pid)
            listener.wait_for(DaemonReady)
            deadline = time.monotonic() + PATIENCE_S
            excused = 0
            while excused < 300:
                assert time.monotonic() < deadline
                total, counted = listener.silences()
                excused = total - counted if counted else 0
                assert excused <= 300
                listener.ranks.wait(0, 20)
            for _ in range(20):
                total, counted = listener.silences()
                assert total - counted == 300, "no more than that"
                listener.ranks.wait(0, 20)
        finally:
            listener.ranks.close()
            busy.kill()
            busy.wait()


def test_what_may_not_be_killed_lives(tmp_path: Path) -> None:
    daemon = start(tmp_path)
    listener = Listener(daemon.endpoint, may_kill=False)
    try:
        listener.wait_for(DaemonReady)
        assert listener.pid == daemon.pid
        listener.ranks.fence(0)
        failed = listener.wait_for(FenceFailed)
        assert isinstance(failed, FenceFailed)
        assert "surely" in failed.reason
        assert daemon.process.poll() is None
    finally:
        listener.ranks.close()
        daemon.process.kill()
        daemon.process.wait()


def test_a_watch_kills_its_process_and_no_other() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    watch = ProcessWatch(child.pid)
    assert watch.kill() == ""
    assert child.wait(PATIENCE_S) == -signal.SIGKILL
    # Its number may be another process's by now.
    assert watch.kill() == ""
    assert watch.is_dead()
    watch.close()
    assert "not known" in ProcessWatch(0).kill()
