"""Where a daemon and its engines meet: the run directory, socket names, and who may serve one.

A daemon of device ``npu:3`` serves ``ipc://<run dir>/npu-3.sock``. The run directory belongs to one
user and is closed to all others, which is what keeps strangers off the sockets. A second bind to an
existing socket path silently takes it over, so a daemon first takes the ``EndpointLock``.
"""

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvcommon.errors import ConfigError

#: Longest path of a Unix socket on Linux: 108 bytes with the closing NUL.
MAX_SOCKET_PATH_BYTES = 107

_DEVICE = re.compile(r"([a-z][a-z0-9_]*):([0-9]+)", re.ASCII)
_TCP = re.compile(r"tcp://\S+:([0-9]+|\*)", re.ASCII)


def run_dir(configured: str = "", environ: Mapping[str, str] = os.environ) -> Path:
    """Find the run directory, and make it if it does not exist.

    The first of these that applies: ``configured``, ``KVFERRY_RUN_DIR``,
    ``/run/user/<uid>/kvferry`` where this user has a ``/run/user/<uid>``,
    ``<temporary directory>/kvferry-<uid>``.

    Returns:
        An absolute path of a directory that is ours with mode 0700.

    Raises:
        ConfigError: it cannot be made, is not a directory, belongs to another user, or others may
            enter it. A symbolic link is followed only where the user named the path.
    """
    chosen = configured or environ.get("KVFERRY_RUN_DIR", "")
    if chosen:
        path = Path(chosen).expanduser().resolve()
    else:
        session = Path(f"/run/user/{os.getuid()}")
        own = session.is_dir() and os.access(session, os.W_OK | os.X_OK)
        temporary = Path(tempfile.gettempdir()).resolve()
        path = session / "kvferry" if own else temporary / f"kvferry-{os.getuid()}"
    try:
        if chosen:
            path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        _check_private(path, path.lstat())
    except OSError as error:
        raise ConfigError(
            f"cannot use the run directory {path}: {error.strerror}; set KVFERRY_RUN_DIR to a "
            "directory that this user can make"
        ) from None
    return path


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"the run directory {path} is not a directory: remove it, or set "
            "KVFERRY_RUN_DIR to another path"
        )
    if status.st_uid != os.getuid():
        raise ConfigError(
            f"the run directory {path} belongs to user {status.st_uid}, not to us "
            f"({os.getuid()}): set KVFERRY_RUN_DIR to a directory of this user"
        )
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"the run directory {path} is open to others (mode {mode:04o}): chmod 700 {path}"
        )


def device_slug(device: str) -> str:
    """Write a device so that it can be a file name: ``npu:3`` → ``npu-3``.

    Raises:
        ConfigError: not ``<kind>:<index>``.
    """
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise ConfigError(f"{device!r} is not a device: write its kind and index, like 'npu:3'")
    return f"{match[1]}-{int(match[2])}"


def daemon_endpoint(directory: Path, device: str) -> str:
    """Name the ZeroMQ endpoint of a device's daemon.

    Raises:
        ConfigError: not a device, or the path is too long for a Unix socket.
    """
    path = directory / f"{device_slug(device)}.sock"
    _check_length(path, "set KVFERRY_RUN_DIR (or run_dir) to a shorter path")
    return f"ipc://{path}"


def check_endpoint(endpoint: str) -> str:
    """Return an endpoint that a person wrote, if a daemon can be there.

    A relative path would mean another socket in every working directory, and an abstract one
    (``ipc://@name``) lies in no directory that keeps strangers off.

    Raises:
        ConfigError: anything but ``ipc://`` with an absolute path or ``tcp://`` with a port.
    """
    if endpoint.startswith("ipc:///"):
        _check_length(Path(endpoint[len("ipc://") :]), "choose a shorter path")
        return endpoint
    if _TCP.fullmatch(endpoint):
        return endpoint
    hint = f"; did you mean ipc://{endpoint}?" if endpoint.startswith("/") else ""
    raise ConfigError(
        f"{endpoint!r} is not an endpoint: write ipc:// and an absolute path, as in "
        f"ipc:///run/kvferry/cpu-0.sock{hint}"
    )


def _check_length(path: Path, remedy: str) -> None:
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} has {size} bytes, more than the {MAX_SOCKET_PATH_BYTES} that "
            f"Linux allows: {remedy}"
        )


class EndpointLock:
    """The right to serve one socket path, held by at most one process.

    The lock is on ``<socket path>.lock``, which is never removed: removing it would let two
    processes lock two files of the same name. The kernel frees the lock when its holder dies.
    Not thread-safe; processes forked while it is held share it.
    """

    def __init__(self) -> None:
        self._fd = -1

    def acquire(self, path: str | Path) -> None:
        """Take the lock of a socket path, then remove the socket a dead daemon left there.

        Raises:
            ConfigError: another daemon serves it, or the lock file cannot be made.
        """
        if self._fd >= 0:
            raise ConfigError(f"this daemon already holds a socket; it cannot also serve {path}")
        try:
            fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot make {path}.lock: {error.strerror}") from None
        try:
            _lock(fd, path)
            _remove_stale_socket(path)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lock(fd: int, path: str | Path) -> None:
    """Lock the file without waiting, and leave our pid in it for the next one to name."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        raise ConfigError(
            f"another daemon (pid {pid or 'unknown'}) serves {path}: stop it, or choose another "
            "device or run directory"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _remove_stale_socket(path: str | Path) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"{path} exists and is not a socket: remove it")
    try:
        Path(path).unlink()
    except OSError as error:
        raise ConfigError(f"cannot remove the stale socket {path}: {error.strerror}") from None
