"""Server processes start, are waited for, and are gone afterwards, children included."""

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

import servers

#: Says that it is ready, in the file named by its first argument, and starts a child that ignores
#: SIGTERM and has a file of /dev/shm mapped.
PARENT = """
import os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import mmap, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4096)
kept = mmap.mmap(file, 4096)
open(sys.argv[2], "w").write(str(os.getpid()))
time.sleep(600)
''', *sys.argv[2:]])
while not pathlib.Path(sys.argv[3]).exists():
    time.sleep(0.01)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def process(tmp_path: Path, code: str, *arguments: str) -> servers.ServerProcess:
    command = [sys.executable, "-c", code, *arguments]
    return servers.ServerProcess("thing", command, tmp_path / "thing.log", dict(os.environ))


def runs(pid: int) -> bool:
    """Say whether a process is there, and not only waits to be reaped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_stop_ends_children_that_ignore_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "STOP_S", 1.0)
    ready, inner = tmp_path / "ready", tmp_path / "inner"
    shared = Path(f"/dev/shm/kvferry-test-{os.getpid()}")
    server = process(tmp_path, PARENT, str(ready), str(shared), str(inner))
    try:
        server.launch()
        server.wait_ready(lambda: ready.exists() and bool(ready.read_text()), 30)
        child = int(ready.read_text())
        assert {server.pid, child} <= {member.pid for member in server.members()}
        server.stop()
        assert not runs(child)
        assert server.pid == 0
        # The killed child could not remove its file: that is what leftovers are.
        assert server.leftovers() == [str(shared)]
        shared.unlink()
        assert server.leftovers() == []
        server.stop()
    finally:
        with contextlib.suppress(servers.ServerError):
            server.stop()
        shared.unlink(missing_ok=True)


def test_a_process_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    server = process(tmp_path, "import sys; print('no such device'); sys.exit(3)")
    server.launch()
    with pytest.raises(servers.ServerError, match=r"(?s)thing ended with status 3.*no such device"):
        server.wait_ready(lambda: False, 30)
    assert server.pid == 0


def test_a_process_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    server = process(tmp_path, "import time; print('hm', flush=True); time.sleep(600)")
    server.launch()
    group = server.pid
    server.wait_ready(lambda: "hm" in servers.log_tail(server.log), 30)
    with pytest.raises(servers.ServerError, match=r"(?s)not ready after 0 s.*hm"):
        server.wait_ready(lambda: False, 0)
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_a_stopped_process_is_woken_to_be_ended(tmp_path: Path) -> None:
    server = process(tmp_path, "import time; time.sleep(600)")
    server.launch()
    psutil.Process(server.pid).suspend()
    group = server.pid
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_log_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "no log" in servers.log_tail(log)
    log.write_text("")
    assert servers.log_tail(log) == "(empty)"
    log.write_text("x" * 10 + "end")
    assert servers.log_tail(log, 4) == "xend"


def test_a_daemon_serves_and_is_gone(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("d")
    folder.chmod(0o700)
    server = servers.DaemonProcess(folder, folder / "log", arguments=["--store", "memory"])
    with server:
        assert runs(server.pid)
        pid = server.pid
    assert not runs(pid)
    assert server.leftovers() == []


def test_engine_environ_keeps_to_loopback() -> None:
    environ = servers.engine_environ({"MORE": "1"})
    assert environ["VLLM_HOST_IP"] == environ["MASTER_ADDR"] == "127.0.0.1"
    assert environ["MORE"] == "1"
    assert environ["PATH"] == os.environ["PATH"]


def test_free_ports_differ() -> None:
    started = time.monotonic()
    ports = {servers.free_port() for _ in range(20)}
    assert len(ports) > 1
    assert time.monotonic() >= started
