import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommon.endpoints import (
    EndpointLock,
    check_endpoint,
    daemon_endpoint,
    device_slug,
    run_dir,
)
from kvcommon.errors import ConfigError


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path leaves room for a socket name (tmp_path may not)."""
    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as folder:
        yield Path(folder)


def test_configured_directory_comes_first(tmp_path: Path) -> None:
    there = run_dir(str(tmp_path / "a" / "b"), {"KVFERRY_RUN_DIR": str(tmp_path / "c")})
    assert there == tmp_path / "a" / "b"
    assert there.stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "c").exists()


def test_environment_comes_second(tmp_path: Path) -> None:
    assert run_dir("", {"KVFERRY_RUN_DIR": str(tmp_path / "c")}) == tmp_path / "c"


def test_default_directory_is_ours_and_private(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    there = run_dir("", {})
    uid = os.getuid()
    assert there in {Path(f"/run/user/{uid}/kvferry"), tmp_path / f"kvferry-{uid}"}
    assert there.stat().st_mode & 0o777 == 0o700


def test_temporary_directory_without_a_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert run_dir("", {}) == tmp_path / f"kvferry-{os.getuid()}"
    assert run_dir("", {}) == tmp_path / f"kvferry-{os.getuid()}"


def test_a_planted_link_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    (tmp_path / f"kvferry-{os.getuid()}").symlink_to(target)
    with pytest.raises(ConfigError, match="not a directory"):
        run_dir("", {})


def test_an_open_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o710)
    with pytest.raises(ConfigError, match=re.escape(f"(mode 0710): chmod 700 {path}")):
        run_dir(str(path))


def test_another_users_directory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {uid}"):
        run_dir(str(tmp_path / "theirs"))


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a directory"):
        run_dir(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set KVFERRY_RUN_DIR"):
        run_dir(str(tmp_path / "file" / "below"))


@pytest.mark.parametrize(
    ("device", "slug"), [("npu:3", "npu-3"), ("cpu:0", "cpu-0"), ("cuda:12", "cuda-12")]
)
def test_slugs(device: str, slug: str) -> None:
    assert device_slug(device) == slug


@pytest.mark.parametrize("device", ["", "npu", "npu:", ":3", "npu:x", "npu:-1", "a/b:0", "npu:3\n"])
def test_what_is_no_device(device: str) -> None:
    with pytest.raises(ConfigError, match="is not a device"):
        device_slug(device)


def test_endpoint() -> None:
    assert daemon_endpoint(Path("/run/kvferry"), "npu:3") == "ipc:///run/kvferry/npu-3.sock"


def test_longest_socket_path_binds_and_a_longer_one_is_refused(short: Path) -> None:
    name = "/cpu-0.sock"
    room = 107 - len(str(short)) - len(name) - 1
    fits = short / ("d" * room)
    fits.mkdir()
    path = daemon_endpoint(fits, "cpu:0").removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
    with pytest.raises(ConfigError, match=r"108 bytes.*shorter path"):
        daemon_endpoint(short / ("d" * (room + 1)), "cpu:0")


@pytest.mark.parametrize("endpoint", ["ipc:///a", "tcp://127.0.0.1:5555", "tcp://[::1]:*"])
def test_an_endpoint_that_a_person_wrote(endpoint: str) -> None:
    assert check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize(
    "endpoint", ["", "foo", "ipc://", "ipc://d.sock", "ipc://@d", "tcp://host", "inproc://d", "/d"]
)
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is not an endpoint: write ipc://"):
        check_endpoint(endpoint)


def test_an_endpoint_that_is_too_long() -> None:
    with pytest.raises(ConfigError, match=r"108 bytes.*choose a shorter path"):
        check_endpoint("ipc:///" + "d" * 107)


def test_lock_is_exclusive_and_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "cpu-0.sock"
    first, second = EndpointLock(), EndpointLock()
    first.acquire(path)
    with pytest.raises(ConfigError, match=rf"another daemon \(pid {os.getpid()}\) serves"):
        second.acquire(path)
    first.release()
    first.release()
    second.acquire(path)
    second.release()


def test_one_lock_holds_one_path(tmp_path: Path) -> None:
    lock = EndpointLock()
    lock.acquire(tmp_path / "a.sock")
    with pytest.raises(ConfigError, match="already holds"):
        lock.acquire(tmp_path / "b.sock")
    lock.release()


def test_a_dead_holders_lock_and_socket_are_taken_over(short: Path) -> None:
    path = short / "cpu-0.sock"
    script = (
        "import os, socket, sys\n"
        "from kvcommon.endpoints import EndpointLock\n"
        "lock = EndpointLock(); lock.acquire(sys.argv[1])\n"
        "server = socket.socket(socket.AF_UNIX); server.bind(sys.argv[1])\n"
        "print('bound', flush=True); sys.stdin.read(); os.abort()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"bound\n"
        lock = EndpointLock()
        with pytest.raises(ConfigError, match=f"pid {child.pid}"):
            lock.acquire(path)
        assert path.is_socket()
        child.kill()
    assert path.is_socket()
    lock.acquire(path)
    assert not path.exists()
    lock.release()


def test_only_sockets_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "cpu-0.sock"
    path.write_text("precious")
    lock = EndpointLock()
    with pytest.raises(ConfigError, match="not a socket"):
        lock.acquire(path)
    assert path.read_text() == "precious"
    path.unlink()
    lock.acquire(path)
    lock.release()


def test_lock_in_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot make"):
        EndpointLock().acquire(tmp_path / "none" / "cpu-0.sock")
