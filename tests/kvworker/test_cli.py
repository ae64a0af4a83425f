"""What people type: ``status`` for eyes and for programs, and errors in one line."""

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from kvcommon import __version__
from kvworker.cli import app
from tests.support.daemonproc import DaemonProcess, command, daemon, environment


@pytest.fixture(scope="module")
def served() -> Iterator[DaemonProcess]:
    with daemon() as running:
        yield running


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and everything printed."""
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_status_for_eyes(served: DaemonProcess) -> None:
    code, text = run("status", "--device", "cpu:0", "--run-dir", str(served.directory))
    assert code == 0
    assert f"pid {served.pid}" in text
    assert "no engine has attached yet" in text


def test_status_for_programs(served: DaemonProcess) -> None:
    code, text = run("status", "--endpoint", served.endpoint, "--json")
    assert code == 0
    status = json.loads(text)
    assert status["pid"] == served.pid
    assert status["metrics"]["kvferry_worker_messages_received_total"] >= 1


def test_status_without_a_daemon_says_so() -> None:
    with tempfile.TemporaryDirectory(prefix="kvf") as run_dir:
        code, text = run("status", "--device", "cpu:0", "--run-dir", run_dir)
    assert code == 2
    assert "no daemon serves" in text


def test_status_of_nobody_in_particular_says_what_is_missing() -> None:
    code, text = run("status")
    assert code == 2
    assert "--device" in text


def test_status_of_a_frozen_daemon_times_out(served: DaemonProcess) -> None:
    served.process.send_signal(signal.SIGSTOP)
    try:
        code, text = run("status", "--endpoint", served.endpoint, "--timeout", "0.2")
    finally:
        served.process.send_signal(signal.SIGCONT)
    assert code == 2
    assert "does not answer" in text


def test_status_of_a_wrong_endpoint_is_one_line() -> None:
    code, text = run("status", "--endpoint", "nonsense")
    assert code == 2
    assert "nonsense" in text


def test_version() -> None:
    assert run("--version") == (0, f"kvferry {__version__}\n")


def test_the_module_runs_as_a_program() -> None:
    ended = subprocess.run(
        command("--help"), capture_output=True, text=True, env=environment(), check=False
    )
    assert ended.returncode == 0
    assert "serve" in ended.stdout
