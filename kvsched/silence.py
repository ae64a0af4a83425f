"""How long a daemon has been silent, and how much of that is its own doing.

A frozen daemon must be killed before its blocks are given back. A healthy one on a starved host is
silent too, but it is not frozen: its threads run, or wait for a processor. That time is excused, up
to a bound: a daemon that spins for ever looks just like it.
"""

from pathlib import Path

#: Parts of ``fence_timeout_ms`` that a starved host excuses. While loads are open the fence must
#: stay below the store's lease; a daemon that only saves writes no block, so it has more time.
LOADING_PATIENCE = 0.2
SAVING_PATIENCE = 2.0


class Silence:
    """One daemon's silence. Times in ns."""

    def __init__(self) -> None:
        #: Since it was last heard, while we listened.
        self.total_ns = 0
        self._excused_ns = 0
        #: ``total_ns`` and ``lived_ns`` when it was last judged; 0: not in this silence.
        self._judged_ns = self._lived_ns = 0

    def heard(self) -> None:
        """It has said something."""
        self.total_ns = self._excused_ns = self._judged_ns = 0

    def counted_ns(self, lived_ns: int, patience_ns: int) -> int:
        """Return the silence that counts against it.

        Args:
            lived_ns: As ``lived_ns()`` says now.
            patience_ns: How much may be excused in all.
        """
        if self._judged_ns:
            silent_ns = self.total_ns - self._judged_ns
            self._excused_ns += max(0, min(silent_ns, lived_ns - self._lived_ns))
        self._excused_ns = min(self._excused_ns, patience_ns)
        self._judged_ns, self._lived_ns = self.total_ns, lived_ns
        return self.total_ns - self._excused_ns


def patience_ns(fence_timeout_ms: float, *, is_loading: bool) -> int:
    """How much of a daemon's silence may be excused in all (``docs/failures.md``)."""
    part = LOADING_PATIENCE if is_loading else SAVING_PATIENCE
    return int(part * fence_timeout_ms * 1e6)


def lived_ns(pid: int) -> int:
    """For how long a process's threads have run or waited for a processor, all together.

    It stands still for a process that is stopped, and for one that waits for something else. 0
    where the kernel does not say, and for no process.
    """
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat") if pid > 0 else ():
        try:
            ran, waited, _ = path.read_text(encoding="ascii").split()
        except (OSError, ValueError):
            continue  # the thread has just ended, or the kernel does not count
        total += int(ran) + int(waited)
    return total
