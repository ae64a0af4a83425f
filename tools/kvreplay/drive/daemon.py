"""The daemon that a recording is played to: ``kvworker serve`` in a process of its own."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from kvcommon.endpoints import daemon_endpoint, device_slug
from kvreplay.drive.errors import DriveError

#: The daemon of this installation.
KVWORKER: Final = (sys.executable, "-m", "kvworker")
_START_S: Final = 60.0
_STOP_S: Final = 15.0
_LOOK_S: Final = 0.02


class Daemon:
    """One serving daemon. Use as a context manager."""

    def __init__(
        self,
        directory: Path,
        device: str,
        options: Sequence[str],
        program: Sequence[str] = KVWORKER,
        *,
        validate: bool = True,
    ) -> None:
        """Remember what to start.

        Args:
            directory: run directory (short: it holds a socket); the event log goes beside it.
            device: what it serves.
            options: more of ``kvworker serve``'s options: the store.
            program: what is run as ``kvworker``.
            validate: it checks every invariant after each event (slow).
        """
        self._directory = directory
        self._device = device
        self._log = directory / f"{device_slug(device)}.log"
        self._descriptor = directory / f"{device_slug(device)}.json"
        self.endpoint = daemon_endpoint(directory, device)
        self._command = [*program, "serve", "--device", device]
        self._command += ["--run-dir", str(directory), "--no-wait", *options]
        self._command += ["--validate"] if validate else []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process; 0 while there is none."""
        return self._process.pid if self._process else 0

    def __enter__(self) -> "Daemon":  # noqa: PYI034 - Python 3.10 has no Self
        """Start it and wait until it serves.

        Raises:
            DriveError: it does not; the text has the end of its log.
        """
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stderr=log)
        deadline = time.monotonic() + _START_S
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise DriveError(f"the daemon does not start:\n{self.log_tail()}")
            time.sleep(_LOOK_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self.stop()

    def stop(self) -> None:
        """End it: politely first. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """End it as a crash would (SIGKILL). Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def check(self) -> None:
        """Raise ``DriveError`` if it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise DriveError(f"the daemon has ended:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the end of what it has logged."""
        with contextlib.suppress(OSError):
            return self._log.read_text("utf-8", errors="replace")[-2000:]
        return ""

    def _serves(self) -> bool:
        try:
            found = json.loads(self._descriptor.read_text("utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(found, dict) and found.get("pid") == self.pid
