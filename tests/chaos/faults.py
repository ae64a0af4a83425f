"""What can befall the processes of a stack, at a moment of a mixed load."""

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

from localmaster import LocalMaster
from servers import DaemonProcess
from tests.e2e.stack import Stack

DEVICE = "cpu:0"
#: Longer than the connector's ``fence_timeout_ms`` here, and than Mooncake's client TTL.
FREEZES_S = (0.3, 1.5, 7.0)


class Surroundings:
    """The daemon and the master of a stack; both come back."""

    def __init__(self, stack: Stack, master: LocalMaster, rng: random.Random) -> None:
        self.stack = stack
        self.master = master
        self.rng = rng
        self.daemon: DaemonProcess = stack.daemon(DEVICE)
        self.daemon.__enter__()

    def heal(self) -> None:
        """Whatever is down is started again."""
        if self._is_gone():
            self.daemon.kill()
            self.daemon = self.stack.daemon(DEVICE)
            self.daemon.__enter__()

    def _is_gone(self) -> bool:
        process = self.daemon._process
        return process is None or process.poll() is not None

    def close(self) -> None:
        self.daemon.stop()

    # The moments.

    def daemon_killed(self) -> None:
        self.daemon.kill()
        time.sleep(self.rng.choice([0.0, 0.5]))
        self.heal()

    def daemon_frozen(self) -> None:
        self._freeze(self.daemon.pid)
        self.heal()

    def daemon_restarted(self) -> None:
        self.daemon.stop()
        self.heal()

    def master_killed(self) -> None:
        self.master.kill()
        time.sleep(self.rng.choice([0.0, 1.0]))
        self.master.start()

    def master_frozen(self) -> None:
        self._freeze(self.master.pid)

    def master_restarted(self) -> None:
        self.master.stop()
        self.master.start()

    def _freeze(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.rng.choice(FREEZES_S))
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return  # fenced


KINDS: dict[str, Callable[[Surroundings], None]] = {
    "daemon kill -9": Surroundings.daemon_killed,
    "daemon frozen": Surroundings.daemon_frozen,
    "daemon restarted": Surroundings.daemon_restarted,
    "master kill -9": Surroundings.master_killed,
    "master frozen": Surroundings.master_frozen,
    "master restarted": Surroundings.master_restarted,
}
#: These end the engine itself; the next one takes over.
ENGINE_KINDS = ("engine kill -9", "engine core kill -9")


def report(rows: dict[str, dict[str, Any]], budget_s: float) -> str:
    """The table of the runs."""
    titles = ("fault", "moments", "requests", "wrong", "leaked", "hung", "worst step s", "busy s")
    lines = ["  ".join(f"{title:>16}" for title in titles)]
    for kind, row in rows.items():
        values = [kind, row["moments"], row["requests"], row["wrong"], row["leaked"], row["hung"]]
        values += [f"{row['worst_s']:.2f}", f"{row['seconds']:.1f}"]
        lines.append("  ".join(f"{value!s:>16}" for value in values))
    lines.append(f"budget of the longest step: {budget_s:.1f} s")
    return "\n".join(lines)
