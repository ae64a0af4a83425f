"""What must not be left or grow: names in /dev/shm, and what a survivor has open."""

import contextlib
import dataclasses
import os
import statistics
import time
from pathlib import Path
from typing import Any

SHM = Path("/dev/shm")
#: What vLLM leaves when one of its processes is killed, without any connector too: message queues
#: between its processes, their locks, and the CPU ranks' exchange.
VLLM_LEAVES = ("psm_", "sem.mp-", "vllm_dist_")
PATIENCE_S = 5.0
#: Cycles before a survivor counts as warm.
WARM_UP = 5
#: How many samples make one end of the comparison.
SAMPLES = 3
#: Threads come and go, and with them their stacks and the allocator's arenas.
SLACK_FDS, SLACK_MAPS = 4, 8
#: Less than half the KV cache of one engine here (48 blocks, 24 MiB): one that is not let go shows.
#: The daemon's store segment is fixed, and the same prompts fill it only once. Thirty deaths of a
#: daemon were seen to cost an engine 0.6 MB, five deaths of an engine its daemon 0.2 MB.
SLACK_RSS_MB = 10.0


class Shm:
    """Looks for new names in /dev/shm."""

    def __init__(self) -> None:
        self._before = _names(SHM)

    def sweep(self) -> list[str]:
        """Remove what vLLM has left, and return the other new names, once nobody uses them.

        Names that a running process has mapped belong to somebody else.
        """
        deadline = time.monotonic() + PATIENCE_S
        while new := self._unused():
            ours = {name for name in new if not name.startswith(VLLM_LEAVES)}
            for name in new - ours:
                with contextlib.suppress(FileNotFoundError):
                    (SHM / name).unlink()
            if not ours or time.monotonic() > deadline:
                return sorted(ours)
            time.sleep(0.1)
        return []

    def _unused(self) -> set[str]:
        new = _names(SHM) - self._before
        return new - _used(new)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _used(names: set[str]) -> set[str]:
    """Those of these files that a process has mapped, by whatever name: glibc makes a semaphore
    under another name and renames it, and its maker's mapping keeps the first one."""
    files: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            status = (SHM / name).stat()
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            files[f"{device} {status.st_ino}"] = name
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text("utf-8", errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                used.add(files.get(f"{fields[3]} {fields[4]}", ""))
    return used


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a process has open."""

    rss_mb: float
    fds: int
    maps: int


def sample(pid: int) -> Sample:
    """Look at a process."""
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    return Sample(
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        len(_names(proc / "fd")),
        len((proc / "maps").read_text("utf-8", errors="replace").splitlines()),
    )


class Survivor:
    """A process that outlives others: after each of their deaths it has no more open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.samples: list[Sample] = []

    def look(self, pid: int) -> None:
        """Take a sample, after a cycle."""
        self.samples.append(sample(pid))

    @property
    def growth(self) -> Sample | None:
        """From the first warm samples to the last ones (medians); None: too few."""
        warm = self.samples[WARM_UP:]
        if len(warm) < 2 * SAMPLES:
            return None
        ends = warm[:SAMPLES], warm[-SAMPLES:]
        first, last = (
            [statistics.median(getattr(each, what) for each in end) for what in _WHAT]
            for end in ends
        )
        rss, fds, maps = (late - early for early, late in zip(first, last, strict=True))
        return Sample(rss, int(fds), int(maps))

    @property
    def problems(self) -> list[str]:
        """What has grown too much."""
        growth = self.growth
        if growth is None:
            return []
        slacks = (SLACK_RSS_MB, SLACK_FDS, SLACK_MAPS)
        return [
            f"{self.name}: {what} grew by {getattr(growth, what):.0f}"
            for what, slack in zip(_WHAT, slacks, strict=True)
            if getattr(growth, what) > slack
        ]

    def text(self) -> str:
        """One line."""
        what = f"{self.name}: {len(self.samples)} cycles"
        if not self.samples:
            return what
        last, growth = self.samples[-1], self.growth
        what += f"; now {last.rss_mb:.0f} MB, {last.fds} fds, {last.maps} maps"
        if growth is None:
            return f"{what}; too few to say whether it grows"
        return (
            f"{what}; grown after {WARM_UP}: {growth.rss_mb:+.1f} MB, {growth.fds:+d} fds, "
            f"{growth.maps:+d} maps"
        )

    def data(self) -> dict[str, Any]:
        """For a program."""
        growth = self.growth
        return {
            "name": self.name,
            "samples": [dataclasses.asdict(each) for each in self.samples],
            "growth": None if growth is None else dataclasses.asdict(growth),
        }


_WHAT = ("rss_mb", "fds", "maps")
