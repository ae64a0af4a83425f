"""Processes of one machine, for the demo, the benchmarks and the tests.

Each class here is a context manager around one server process and everything it starts: it picks
its own loopback port or socket, writes all output to a log file, waits (bounded) until the server
answers, and ends its whole process group on the way out. What goes wrong is a ``ServerError`` that
carries the end of the log.

The processes are to be started from the main thread: they are told to end when it does.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import psutil

import apiclient
from kvcommon.endpoints import daemon_endpoint

if TYPE_CHECKING:
    from typing_extensions import Self

#: Longest time until an engine or a daemon answers.
ENGINE_START_S = 240.0
DAEMON_START_S = 60.0
#: How long a server may take to end by itself, before it is killed.
STOP_S = 20.0
#: ``prctl`` option: the kernel sends this signal when the parent thread ends.
_PR_SET_PDEATHSIG = 1

#: All traffic on loopback, nothing downloaded or reported, the same block hashes everywhere, and
#: one pinned-to-nothing thread for every engine (with a connector vLLM would else take two).
ENGINE_ENVIRON = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class ServerError(Exception):
    """A server did not start, ended, or does not answer; the text has the end of its log."""


def engine_environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with the settings every engine here gets."""
    return {**os.environ, **ENGINE_ENVIRON, **(extra or {})}


def end_on_sigterm() -> None:
    """Let SIGTERM leave all blocks of this process, so that a polite kill cleans up as well."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def free_port() -> int:
    """Return a TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def log_tail(path: Path, size: int = 3000) -> str:
    """Return the last ``size`` characters of a log, or a word that there is none."""
    try:
        return path.read_text("utf-8", errors="replace")[-size:] or "(empty)"
    except OSError as error:
        return f"(no log: {error})"


class ServerProcess:
    """One process in a session of its own, with all its children.

    Args:
        name: What to call it in errors.
        command: What to run.
        log: File that takes stdout and stderr, appended to.
        environ: The whole environment.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environ = dict(environ)
        self._process: subprocess.Popen[bytes] | None = None
        #: Files under /dev/shm that the process or a child was seen to use.
        self.shm_files: set[str] = set()

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its process group; 0 when it is not running."""
        return self._process.pid if self._process else 0

    def launch(self, pass_fds: Sequence[int] = ()) -> None:
        """Start it, without waiting for anything; ``pass_fds`` stay open in it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no locks
            )

    def wait_ready(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``ready`` says so.

        Raises:
            ServerError: the process ended, or is not ready in time. It has been stopped then.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.check_alive()
            if time.monotonic() > deadline:
                text = f"{self.name} is not ready after {timeout_s:.0f} s"
                text += f"; its log {self.log} ends:\n{log_tail(self.log)}"
                self.stop()
                raise ServerError(text)
            time.sleep(0.05)

    def check_alive(self) -> None:
        """Raise ``ServerError`` if the process has ended."""
        status = self._process.poll() if self._process else None
        if status is None and self._process:
            return
        self.stop()
        raise ServerError(
            f"{self.name} ended with status {status}; its log {self.log} ends:\n"
            f"{log_tail(self.log)}"
        )

    def members(self) -> list[psutil.Process]:
        """Return the processes of its group that run now, itself included."""
        return _group_members(self.pid) if self.pid else []

    def note_shm(self) -> None:
        """Remember which files of /dev/shm its processes have mapped now."""
        for member in self.members():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{member.pid}/maps").read_text("utf-8", errors="replace")
                for line in maps.splitlines():
                    path = line.partition("/dev/shm/")[2]  # noqa: S108 - a name is looked for
                    if path and not path.endswith("(deleted)"):
                        self.shm_files.add("/dev/shm/" + path)  # noqa: S108

    def stop(self) -> None:
        """End the whole group: SIGTERM, then SIGKILL for what is left. Idempotent.

        Raises:
            ServerError: processes are left that cannot be ended.
        """
        process, group = self._process, self.pid
        if process is None:
            return
        self.note_shm()
        for sign, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            with contextlib.suppress(ProcessLookupError):
                # The leader first: a server that ends by itself also ends its children properly.
                os.killpg(group, signal.SIGCONT)
                if sign is signal.SIGTERM and process.poll() is None:
                    os.kill(group, sign)
                else:
                    os.killpg(group, sign)
            if self._gone(process, group, wait_s):
                self._process = None
                return
        raise ServerError(f"{self.name}: process group {group} cannot be ended")

    def kill(self) -> None:
        """End the whole group as a crash would."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._gone(self._process, self.pid, STOP_S)
            self._process = None

    @staticmethod
    def _gone(process: "subprocess.Popen[bytes]", group: int, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if process.poll() is not None and not _group_members(group):
                return True
            time.sleep(0.05)
        return False

    def leftovers(self) -> list[str]:
        """Say what it left behind after ``stop``: files it used in /dev/shm that still exist."""
        return sorted(path for path in self.shm_files if Path(path).exists())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self.stop()


class VllmServer(ServerProcess):
    """``vllm serve`` on a free port of loopback.

    Args:
        model: Folder of the model.
        log: Its log file.
        kv_transfer: ``--kv-transfer-config``, if any.
        arguments: More of its arguments.
        environ: More of its environment.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        kv_transfer: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        name: str = "vllm",
    ) -> None:
        port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
        # Left to itself vLLM turns a float32 model into bfloat16, and logprobs then differ by
        # 0.03 between a prompt computed at once and one computed behind a cached prefix.
        command += ["--dtype", "float32", "--seed", "0"]
        command += ["--enable-prompt-tokens-details", *arguments]
        if kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(kv_transfer)]
        super().__init__(name, command, log, engine_environ(environ))
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> "Self":
        """Start it, if ``launch`` has not, and wait until it is healthy."""
        if not self.pid:
            self.launch()
        self.wait_ready(lambda: apiclient.is_healthy(self.url), ENGINE_START_S)
        return self


class DaemonProcess(ServerProcess):
    """``kvworker serve`` for one device.

    Args:
        run_dir: Run directory, handed over as ``KVFERRY_RUN_DIR``.
        log: Its log file.
        device: For example ``cpu:0``.
        arguments: More of its arguments, for example ``--store memory``.
        environ: More of its environment.
    """

    def __init__(
        self,
        run_dir: Path,
        log: Path,
        *,
        device: str = "cpu:0",
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        name: str = "kvworker",
    ) -> None:
        command = [sys.executable, "-m", "kvworker", "serve", "--device", device, *arguments]
        whole = {**os.environ, "KVFERRY_RUN_DIR": str(run_dir), **(environ or {})}
        super().__init__(name, command, log, whole)
        self.socket_path = daemon_endpoint(run_dir, device).removeprefix("ipc://")

    def __enter__(self) -> "Self":
        """Start it and wait until it listens."""
        self.launch()
        self.wait_ready(self._listens, DAEMON_START_S)
        return self

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(self.socket_path)
            return True
        return False


def _group_members(group: int) -> list[psutil.Process]:
    """Return the processes of a group. Not the dead that nobody has reaped yet: where the first
    process of a container is no init, orphans may stay like that."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) == group:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
