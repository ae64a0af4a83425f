"""What a run is played on: daemons, conversations and ranks, and waiting for them.

The recording's driver and the run's own errands share one stage. One thread owns it; every wait is
bounded.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvcommon.ids import new_epoch
from kvreplay.drive.daemon import KVWORKER, Daemon
from kvreplay.drive.errors import DriveError
from kvreplay.drive.link import Links
from kvreplay.drive.outcomes import Item, Tally, describe
from kvreplay.drive.rank import Rank, Setting
from kvreplay.loading import Log

_LOOK_S: Final = 0.05
#: While a layerwise load runs, its progress is looked at so often.
_WATCH_S: Final = 0.001


@dataclass(frozen=True)
class Options:
    """How to play."""

    #: Directory for run directory and new logs; short, it holds sockets.
    directory: Path
    #: Options of ``kvworker serve`` that name the store.
    store: Sequence[str] = ("--store", "memory")
    #: How long an object of a store that outlives the run may be leased; None: no such store.
    lease_s: float | None = None
    #: 1: as recorded, 2: twice as fast; 0: as fast as possible.
    speed: float = 0.0
    #: Stop at this offset of the recording.
    until_ns: int | None = None
    #: Play only what this request needs.
    only: str | None = None
    seed: int = 0
    #: How long an answer may take, and the whole run.
    answer_s: float = 20.0
    limit_s: float = 600.0
    #: What is run as ``kvworker``.
    program: Sequence[str] = KVWORKER


@dataclass
class Played:
    """What came of a run."""

    tally: Tally = field(default_factory=Tally)
    num_said: int = 0
    seconds: float = 0.0
    recorded_seconds: float = 0.0
    #: Objects stored before the recording began, and objects read back at its end.
    num_seeded: int = 0
    num_audited: int = 0
    #: Objects of the run that were removed from a store that outlives it.
    num_removed: int = 0
    notes: list[str] = field(default_factory=list)


class Stage:
    """Daemons and ranks of one run."""

    def __init__(self, logs: Sequence[Log], options: Options) -> None:
        """Nothing is started yet; ``logs`` are those of the daemons."""
        self._logs = {log.label: log for log in logs}
        self.options = options
        self.played = Played()
        #: Word in the namespaces of this run.
        self.word = f"{new_epoch():x}"
        self.daemons: dict[str, Daemon] = {}
        #: By label of the daemon's log, and ``<engine id>#<rank>``.
        self.ranks: dict[tuple[str, str], Rank] = {}
        self._devices: dict[str, str] = {}
        self._links = Links()
        self._deadline_s = time.monotonic() + options.limit_s

    @property
    def tally(self) -> Tally:
        """Outcomes and faults."""
        return self.played.tally

    # -- daemons and ranks ---------------------------------------------------------------------

    def start(self, label: str, more: Sequence[str] = ()) -> None:
        """Start the daemon of a log, with more options; one that serves the device is ended.

        Raises:
            DriveError: it does not start.
        """
        log = self._logs[label]
        number = log.header.info.get("device", "cpu:0").rpartition(":")[2]
        device = f"cpu:{number if number.isdecimal() else 0}"
        for other in self._devices:
            if self._devices[other] == device:
                self.end(other)
        if not log.begins_at_start:
            self.played.notes.append(f"{label} does not begin at its start")
        logs = str(self.options.directory / "logs")
        options = [*self.options.store, "--event-log", logs, *more]
        daemon = Daemon(self.options.directory, device, options, self.options.program)
        self.daemons[label], self._devices[label] = daemon, device
        daemon.__enter__()

    def end(self, label: str, *, killed: bool = False) -> None:
        """End the daemon of a log, politely or not; then its engines let go. Idempotent."""
        daemon = self.daemons[label]
        if killed:
            daemon.kill()
        else:
            daemon.stop()
        for (owner, _), rank in self.ranks.items():
            if owner == label:
                rank.check_released()
                rank.close()

    def rank(self, label: str, name: str) -> Rank:
        """Return the rank of an engine that talks to the daemon of a log."""
        key = (label, name)
        if key not in self.ranks:
            setting = Setting(
                links=self._links,
                seed=self.options.seed,
                word=self.word,
                device=self._devices[label],
                endpoint=self.daemons[label].endpoint,
                tally=self.tally,
            )
            self.ranks[key] = Rank(name, setting)
        return self.ranks[key]

    def close(self) -> None:
        """End everything."""
        for rank in self.ranks.values():
            rank.close()
        for daemon in self.daemons.values():
            with contextlib.suppress(DriveError):
                daemon.stop()
        self._links.close()

    # -- waiting -------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Listen until something is so; note a fault if that takes too long."""
        if not self.wait_for(done, self.options.answer_s):
            self.tally.fault(f"{what} after {self.options.answer_s:g} s")

    def wait_for(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Listen until something is so, at most so long; tell whether it is."""
        deadline = time.monotonic() + limit_s
        while not done():
            self._check_time()
            if time.monotonic() > deadline:
                return False
            self.listen(_LOOK_S)
        return True

    def wait_until(self, moment_s: float) -> None:
        """Listen until this moment of the monotonic clock."""
        while (left := moment_s - time.monotonic()) > 0:
            self.listen(min(left, _LOOK_S))

    def listen(self, timeout_s: float) -> None:
        """Take in what daemons say.

        Raises:
            DriveError: a daemon has ended or is out of step, or time is up.
        """
        self._check_time()
        nothing = True
        if sum(rank.watch() for rank in self.ranks.values()):
            timeout_s = min(timeout_s, _WATCH_S)
        for link, body in self._links.hear(timeout_s):
            nothing = False
            for (log, name), rank in self.ranks.items():
                if rank.owns(link):
                    rank.heard(body)
                    if link.channel.role == "scheduler":
                        for kind, number, what in describe(body):
                            self.tally.found[Item(kind, log, name, number)] = what
        if nothing:
            for daemon in self.daemons.values():
                daemon.check()

    @property
    def left_s(self) -> float:
        """What is left of the run's time."""
        return max(0.0, self._deadline_s - time.monotonic())

    def grant(self, seconds: float) -> None:
        """Let the run last at least so long from now."""
        self._deadline_s = max(self._deadline_s, time.monotonic() + seconds)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise DriveError(f"the run takes longer than {self.options.limit_s:g} s (--limit)")
