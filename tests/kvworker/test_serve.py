"""``kvworker serve`` as a process: exit statuses, error lines, signals, stores that come late."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommon.eventlog import read_log
from kvcommon.messages import Hello, RankIdentity, StoreState, Welcome
from localmaster import LocalMaster
from tests.support.client import Client
from tests.support.daemonproc import command, daemon, environment

PATIENCE_S = 30.0


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private directory whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kvf") as name:
        yield Path(name)


def serve(run_dir: Path, *options: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run ``serve`` where it must fail."""
    return subprocess.run(
        command("serve", "--run-dir", str(run_dir), *options),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**environment(), **environ},
        check=False,
    )


def refused(ended: "subprocess.CompletedProcess[str]") -> str:
    """The one line that says what to change."""
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("kvworker: error: ")]
    return line


def test_second_daemon_of_a_device_is_refused(short_dir: Path) -> None:
    with daemon(directory=short_dir) as running:
        line = refused(serve(short_dir, "--device", "cpu:0", "--store", "memory"))
        assert f"pid {running.pid}" in line
        assert running.status().pid == running.pid


def test_two_devices_live_in_one_run_directory(short_dir: Path) -> None:
    with daemon(directory=short_dir) as one, daemon(device="cpu:1", directory=short_dir) as two:
        assert (one.status().device, two.status().device) == ("cpu:0", "cpu:1")


def test_a_killed_daemon_is_replaced(short_dir: Path) -> None:
    with daemon(directory=short_dir) as first:
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(PATIENCE_S)
        assert first.socket_path.exists(), "the case that is tested"
        with daemon(directory=short_dir) as second:
            assert second.status().pid == second.pid


@pytest.mark.parametrize("device", ["gpu:0", "cpu", "npu:x"])
def test_wrong_device_is_named(short_dir: Path, device: str) -> None:
    assert device in refused(serve(short_dir, "--device", device, "--store", "memory"))


def test_socket_path_too_long_says_what_to_do(short_dir: Path) -> None:
    line = refused(serve(short_dir / ("x" * 100), "--device", "cpu:0", "--store", "memory"))
    assert "107" in line
    assert "KVFERRY_RUN_DIR" in line


def test_wrong_size_is_named(short_dir: Path) -> None:
    options = ("--device", "cpu:0", "--store", "memory", "--memory-limit", "4 potatoes")
    assert "4 potatoes" in refused(serve(short_dir, *options))


def test_unknown_option_is_named(short_dir: Path) -> None:
    ended = serve(short_dir, "--device", "cpu:0", "--stoer", "memory")
    assert ended.returncode == 2
    assert "--stoer" in ended.stderr


def test_tcp_beyond_loopback_is_refused(short_dir: Path) -> None:
    options = ("--device", "cpu:0", "--store", "memory", "--endpoint", "tcp://0.0.0.0:0")
    assert "loopback" in refused(serve(short_dir, *options))


def test_mooncake_without_a_master_address_says_how_to_give_one(short_dir: Path) -> None:
    assert "MOONCAKE_MASTER" in refused(serve(short_dir, "--device", "cpu:0"))


def test_absent_master_is_fatal_only_if_asked(short_dir: Path) -> None:
    options = ("--device", "cpu:0", "--no-wait")
    ended = serve(short_dir, *options, MOONCAKE_MASTER="127.0.0.1:1")
    line = refused(ended)
    assert "127.0.0.1:1" in line
    assert "again" not in ended.stderr
    assert list(short_dir.glob("*.sock")) == []


def test_nonsensical_master_is_fatal_although_waiting_is_allowed(short_dir: Path) -> None:
    line = refused(serve(short_dir, "--device", "cpu:0", MOONCAKE_MASTER="carrier-pigeon"))
    assert "carrier-pigeon" in line


def test_daemon_before_its_store_serves_and_finds_it_later() -> None:
    with LocalMaster() as master:
        master.kill()
        environ = {"MOONCAKE_MASTER": master.address, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64MiB"}
        with daemon("--store", "mooncake", environ=environ) as running:
            assert running.status().store_state is StoreState.DOWN
            with Client(running.endpoint, "scheduler") as scheduler:
                ranks = (RankIdentity(rank=0, fingerprint="f"),)
                scheduler.say(Hello(pid=os.getpid(), ranks=ranks))
                scheduler.hear(Welcome)
            master.start()
            deadline = time.monotonic() + PATIENCE_S
            while running.status().store_state is StoreState.DOWN:
                assert time.monotonic() < deadline, running.log
                time.sleep(0.05)
            assert "trying again" in running.log


def test_frozen_master_does_not_keep_the_daemon_from_ending() -> None:
    with LocalMaster() as master:
        environ = {"MOONCAKE_MASTER": master.address, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64MiB"}
        with daemon("--store", "mooncake", environ=environ) as running:
            master.freeze()
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(PATIENCE_S) == 0, running.log
        master.thaw()


def test_a_master_that_is_frozen_when_the_daemon_starts_is_waited_for() -> None:
    with LocalMaster() as master:
        master.freeze()
        environ = {"MOONCAKE_MASTER": master.address, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64MiB"}
        with daemon("--store", "mooncake", environ=environ) as running:
            deadline = time.monotonic() + 2 * PATIENCE_S
            while "did not answer" not in running.log:
                assert time.monotonic() < deadline, running.log
                time.sleep(0.1)
            master.thaw()
            while "is open" not in running.log:
                assert time.monotonic() < deadline, running.log
                time.sleep(0.1)
            assert running.status().store_state is StoreState.UP


def test_event_log_is_written_and_readable(short_dir: Path) -> None:
    log_dir = short_dir / "log"
    with daemon("--event-log", str(log_dir)) as running:
        with Client(running.endpoint, "scheduler") as scheduler:
            ranks = (RankIdentity(rank=0, fingerprint="f"),)
            scheduler.say(Hello(pid=os.getpid(), ranks=ranks), cause="kvsched-x:7")
            welcome = scheduler.hear(Welcome)
        assert welcome.event_log == str(log_dir)
    [path] = log_dir.iterdir()
    log = read_log(path)
    assert log.header.core == "kvworker"
    assert "kvsched-x:7" in [record.cause for record in log]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_it_cleanly(signum: signal.Signals) -> None:
    with daemon() as running:
        running.process.send_signal(signum)
        assert running.process.wait(PATIENCE_S) == 0
        assert "stopped" in running.log


def test_a_closed_terminal_does_not_end_what_runs_under_nohup(short_dir: Path) -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with daemon(directory=short_dir) as running:
            running.process.send_signal(signal.SIGHUP)
            assert running.status().pid == running.pid
            running.process.terminate()
            assert running.process.wait(PATIENCE_S) == 0
            assert "SIGHUP" not in running.log
    finally:
        signal.signal(signal.SIGHUP, old)


def test_the_daemon_takes_all_descriptors_that_it_may(short_dir: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with daemon(directory=short_dir) as running:
            assert resource.prlimit(running.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FAULTY = """
import sys
from kvworker.cli import main
from kvworker.core.core import WorkerCore

def fault(core, event):
    raise AssertionError("an invariant is broken")

WorkerCore.handle = fault
sys.argv = ["kvworker", *sys.argv[1:]]
main()
"""


def test_a_fault_of_ours_ends_the_process_for_its_supervisor(short_dir: Path) -> None:
    arguments = command("serve", "--device", "cpu:0", "--store", "memory")[3:]
    ended = subprocess.run(
        [sys.executable, "-c", FAULTY, *arguments, "--run-dir", str(short_dir)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(),
        check=False,
    )
    assert ended.returncode == 1
    assert "CRITICAL" in ended.stderr
    assert "an invariant is broken" in ended.stderr
    assert [path.name for path in short_dir.iterdir()] == ["cpu-0.sock.lock"]
