"""A real ``mooncake_master`` on loopback, for the demo, the benchmarks and the tests.

    with LocalMaster() as master:
        environ["MOONCAKE_MASTER"] = master.address

The master is the binary of the installed ``mooncake`` package. It listens on free ports of
127.0.0.1 only, writes its log to a file in a directory of its own, dies with this process, and is
ended by its process id when the block is left.
"""

import contextlib
import ctypes
import importlib.util
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from types import TracebackType

#: How long a master may take until it accepts connections, and until it is gone after SIGTERM.
_START_S = 20.0
_STOP_S = 5.0
#: ``prctl`` option: the kernel sends this signal when the parent thread ends.
_PR_SET_PDEATHSIG = 1
#: How many pairs of ports to try: a free port can be taken before the master binds it.
_TRIES = 5


class MasterError(Exception):
    """The master cannot be started; the text says why and what its log ends with."""


def master_binary() -> pathlib.Path | None:
    """Return the ``mooncake_master`` that the installed wheel brings, if it is installed."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = pathlib.Path(folder) / "mooncake_master"
        if path.is_file():
            return path
    return None


class LocalMaster:
    """One master process.

    Args:
        flags: More of the master's flags, for example ``--default_kv_lease_ttl=500``.
    """

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._port = 0

    @property
    def address(self) -> str:
        """``host:port`` for ``master_server_address``."""
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The process id; 0 when it is not running."""
        return self._process.pid if self._process else 0

    def __enter__(self) -> "LocalMaster":  # noqa: PYI034 - Python 3.10 has no Self
        """Start it."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it."""
        self.stop()

    def start(self) -> None:
        """Start the master and return when it accepts connections.

        A second call after ``stop`` or ``kill`` uses the same port, as a restarted master would.

        Raises:
            MasterError: not installed, or it ended at once.
        """
        binary = master_binary()
        if binary is None:
            raise MasterError(
                "no mooncake_master here: install the mooncake wheel, for example "
                "pip install 'kvferry[cpu]'"
            )
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="kvferry-master-")
        tries = 1 if self._port else _TRIES
        for left in reversed(range(tries)):
            port = self._port or _free_port()
            try:
                self._start_once(binary, port)
            except MasterError:
                if not left:
                    raise
            else:
                self._port = port
                return

    def _start_once(self, binary: pathlib.Path, port: int) -> None:
        log = self.log_path
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    str(binary),
                    "--rpc_address=127.0.0.1",
                    f"--rpc_port={port}",
                    "--enable_http_metadata_server=false",
                    "--metrics_host=127.0.0.1",
                    f"--metrics_port={_free_port()}",
                    "--logtostderr=true",
                    *self._flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no locks
            )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                break
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
            time.sleep(0.02)
        self.kill()
        tail = log.read_text(errors="replace")[-2000:]
        raise MasterError(f"mooncake_master did not start on port {port}; its log ends:\n{tail}")

    @property
    def log_path(self) -> pathlib.Path:
        """Where the master's output goes while it lives."""
        return pathlib.Path(self._folder or tempfile.gettempdir()) / "master.log"

    def stop(self) -> None:
        """End the master, wait until it is gone, and remove its log. Idempotent."""
        process = self._process
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self) -> None:
        """End the master as a crash would (SIGKILL) and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop the master without ending it (SIGSTOP); return when it stands. Calls to it hang."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let a frozen master run on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
