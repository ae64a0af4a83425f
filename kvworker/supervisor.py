"""``kvworker up``: one daemon per device of a node, each restarted when it ends.

The supervisor owns nothing that a daemon needs: if it is killed, daemons end with it (the kernel
tells them), and engines attach to the next ones. One thread; it waits for children and signals.
"""

import ctypes
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvcommon.errors import ConfigError

logger = logging.getLogger("kvferry.supervisor")

#: First and longest pause before a daemon is started again; doubled each time it ends early.
BACKOFF_S, BACKOFF_MAX_S = 0.5, 30.0
#: A daemon that has lived so long ended for another reason than the last one.
SETTLED_S = 60.0
#: How long a daemon may take to stop before it is killed.
STOP_S = 15.0
#: Exit status of a daemon whose user must change something.
EXIT_USAGE = 2
_PR_SET_PDEATHSIG = 1
_RANGE = re.compile(r"([a-z][a-z0-9_]*):(\d+)(?:-(\d+))?", re.ASCII)
#: Which cards of a kind this node's engines may use, in vLLM's order.
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


def parse_devices(text: str, environ: Mapping[str, str]) -> list[str]:
    """Read ``npu:0-7`` or ``cpu:0,cpu:1``.

    A daemon serves a card by its physical number. Where the environment restricts the cards, only
    those that it names are served.

    Raises:
        ConfigError: not devices, one twice, or none that the environment lets us see.
    """
    found: list[str] = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigError(f"{part!r} is no device: write npu:0-7, or cpu:0,cpu:1")
        kind, first, last = match[1], int(match[2]), int(match[3] or match[2])
        if last < first:
            raise ConfigError(f"{part!r}: the range is empty")
        visible = environ.get(_VISIBLE.get(kind, ""), "").strip()
        allowed = {int(one) for one in visible.split(",") if one.strip().isdigit()}
        numbers = [n for n in range(first, last + 1) if not visible or n in allowed]
        found += [f"{kind}:{number}" for number in numbers]
    if not found:
        raise ConfigError(f"no device to serve in {text!r}, as far as the environment lets us see")
    if len(set(found)) < len(found):
        raise ConfigError(f"a device is named twice in {text!r}")
    return found


def sweep(directory: Path) -> list[str]:
    """Remove the sockets that inline daemons of dead processes left behind; returns their names."""
    swept = []
    for path in sorted(directory.glob("in-*.sock")):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                swept.append(path.name)
            except OSError:
                continue
    return swept


class Child:
    """One device's daemon, over all its lives."""

    def __init__(self, device: str, command: Sequence[str]) -> None:
        self.device = device
        self._command = list(command)
        self.process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._pause_s = BACKOFF_S
        #: When to start it (again); monotonic seconds.
        self.due = 0.0
        self.num_starts = 0

    def start(self) -> None:
        """Start the daemon; it ends with us."""
        parent = os.getpid()
        self._started = time.monotonic()
        self.num_starts += 1
        try:
            self.process = subprocess.Popen(
                self._command,
                preexec_fn=lambda: _end_with(parent),  # noqa: PLW1509 (two system calls, no locks)
            )
        except (OSError, subprocess.SubprocessError) as error:
            # Too many processes or files: the daemons that run must not end for it.
            logger.warning(
                "%s: cannot start a daemon (%s); trying again in %.1f s",
                self.device,
                error,
                self._pause_s,
            )
            self._put_off()
            return
        logger.info("%s: started daemon %d", self.device, self.process.pid)

    def look(self) -> None:
        """Notice its end, and decide when to start it again."""
        process = self.process
        status = process.poll() if process is not None else None
        if process is None or status is None:
            return
        self.process = None
        now = time.monotonic()
        if now - self._started > SETTLED_S:
            self._pause_s = BACKOFF_S
        logger.log(
            logging.ERROR if status == EXIT_USAGE else logging.WARNING,
            "%s: daemon %d ended (%s); starting it again in %.1f s",
            self.device,
            process.pid,
            f"signal {-status}" if status < 0 else f"status {status}",
            self._pause_s,
        )
        self._put_off()

    def _put_off(self) -> None:
        self.due = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, BACKOFF_MAX_S)

    def send(self, signum: int) -> None:
        """Forward a signal."""
        if self.process is not None:
            self.process.send_signal(signum)

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL if that is not enough."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            logger.error(  # noqa: TRY400 (no fault of ours)
                "%s: daemon %d does not stop; killing it", self.device, self.process.pid
            )
            self.process.kill()
            status = self.process.wait()
        logger.info("%s: daemon %d stopped (status %d)", self.device, self.process.pid, status)
        self.process = None


class Supervisor:
    """All daemons of a node."""

    def __init__(self, devices: Sequence[str], arguments: Sequence[str]) -> None:
        """``arguments`` go to each ``kvworker serve``, after its device."""
        base = [sys.executable, "-m", "kvworker", "serve", "--device"]
        self.children = [Child(device, [*base, device, *arguments]) for device in devices]
        self._stopping = False
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Keep every daemon running until SIGTERM or SIGINT; then stop them in reverse order."""
        old = {
            signum: signal.signal(signum, handler)
            for signum, handler in (
                (signal.SIGTERM, self._stop),
                (signal.SIGINT, self._stop),
                (signal.SIGHUP, self._forward),
                (signal.SIGUSR1, self._forward),
                (signal.SIGCHLD, self._ignore),
            )
            # nohup: a closed terminal ends neither us nor, as they inherit it, the daemons.
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN
        }
        wakeup = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        try:
            while not self._stopping:
                self._wait(self._turn())
        finally:
            for child in reversed(self.children):
                child.stop()
            signal.set_wakeup_fd(wakeup)
            for signum, handler in old.items():
                signal.signal(signum, handler)
            os.close(self._wake)
            os.close(self._woken)

    def _turn(self) -> float:
        """Start what is due; returns seconds until something is."""
        now = time.monotonic()
        for child in self.children:
            child.look()
            if child.process is None and child.due <= now:
                child.start()
        dues = [child.due - now for child in self.children if child.process is None]
        return max(0.0, min(dues, default=60.0))

    def _wait(self, seconds: float) -> None:
        """Until a signal comes, or for so long."""
        ready, _, _ = select.select([self._wake], [], [], seconds)
        if ready:
            os.read(self._wake, 4096)

    def _stop(self, signum: int, _frame: object) -> None:
        logger.info("stopping: %s", signal.Signals(signum).name)
        self._stopping = True

    def _forward(self, signum: int, _frame: object) -> None:
        for child in self.children:
            child.send(signum)

    def _ignore(self, _signum: int, _frame: object) -> None:
        """A child has ended: the wake-up is all that is needed."""


def _end_with(parent: int) -> None:
    """In a child: end when the supervisor does, even if it was killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def up(devices: Sequence[str], arguments: Sequence[str], directory: Path) -> None:
    """Sweep what the dead have left, and supervise."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in sweep(directory):
        logger.info("removed the socket of a dead process: %s", name)
    Supervisor(devices, arguments).run()


__all__ = ["Supervisor", "parse_devices", "sweep", "up"]
