"""``run``: a recording played to real daemons, and what that says about it.

This module reads and compares; what talks to daemons is in ``kvreplay.drive``, imported here only
when a run begins, because it needs ZeroMQ and the rest of ``kvreplay`` does not.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.diff import Row, compare_stats
from kvreplay.loading import LogSet, open_logs
from kvreplay.stats import Stats, gather
from kvreplay.verify import Result, verify

if TYPE_CHECKING:
    from kvreplay.drive.stage import Played


class RunError(Exception):
    """The recording cannot be played; the message says why."""


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for."""

    #: ``memory`` or the path of Mooncake's JSON file.
    mooncake_config: str = ""
    memory_limit: str = "1GiB"
    #: Factor on the recorded pace; 0: as fast as possible.
    speed: float = 0.0
    until_s: float | None = None
    only: str | None = None
    seed: int = 0
    limit_s: float = 600.0
    answer_s: float = 20.0
    #: Keep the new logs here; None: they are thrown away.
    out: Path | None = None


@dataclass
class Report:
    """Everything that ``run`` prints."""

    num_said: int
    num_same: int
    differences: list[str]
    faults: list[str]
    num_faults: int
    num_checked: int
    num_seeded: int
    num_audited: int
    #: Objects of the run that were removed from Mooncake at its end.
    num_removed: int
    seconds: float
    recorded_seconds: float
    notes: list[str]
    #: Timings of the recording and of the run, side by side.
    rows: list[Row] = field(default_factory=list)
    #: The new logs obey the rules and replay.
    is_sound: bool = True

    @property
    def status(self) -> int:
        """0: as recorded, and every byte right; 1: not."""
        return 1 if self.differences or self.num_faults or not self.is_sound else 0

    def plain(self) -> dict[str, object]:
        """What ``--json`` prints."""
        names = [name for name in self.__dataclass_fields__ if name != "rows"]
        rows = [
            {"name": row.name, "recorded": row.a, "now": row.b, "change": row.change}
            for row in self.rows
        ]
        return {"status": self.status, **{n: getattr(self, n) for n in names}, "timings": rows}


def run(logs: LogSet, wishes: Wishes) -> Report:
    """Play the daemons' logs.

    Raises:
        RunError: there is nothing to play, or a daemon cannot be run.
    """
    from kvcommon.config import mooncake_config
    from kvcommon.errors import ConfigError, RemoteProtocolError
    from kvreplay.drive.driver import Driver
    from kvreplay.drive.errors import DriveError
    from kvreplay.drive.stage import Options

    with _directory() as directory:
        lease_s = None
        with contextlib.suppress(ConfigError):
            # What is wrong with the file, the daemon says.
            if wishes.mooncake_config:
                found = mooncake_config(wishes.mooncake_config, os.environ)
                lease_s = found.store_lease_ms / 1000
        options = Options(
            directory=directory,
            store=_store(wishes),
            lease_s=lease_s,
            speed=wishes.speed,
            until_ns=None if wishes.until_s is None else round(wishes.until_s * 1e9),
            only=wishes.only,
            seed=wishes.seed,
            limit_s=wishes.limit_s,
            answer_s=wishes.answer_s,
        )
        try:
            played = Driver(logs.logs, options).play()
        except (DriveError, ConfigError, RemoteProtocolError) as error:
            raise RunError(str(error)) from None
        new = open_logs([directory / "logs"])
        report = _report(played)
        verdict = verify(new)
        report.is_sound = not verdict.judgement.violations and all(
            one.result is not Result.DIFFERENT for one in verdict.replays
        )
        report.rows = compare_stats(_daemons(logs), gather(new))
        if wishes.out is not None:
            _keep(directory / "logs", wishes.out)
    return report


def _store(wishes: Wishes) -> list[str]:
    if wishes.mooncake_config:
        path = str(Path(wishes.mooncake_config).resolve())
        return ["--store", "mooncake", "--mooncake-config", path]
    return ["--store", "memory", "--memory-limit", wishes.memory_limit]


def _daemons(logs: LogSet) -> Stats:
    return gather(LogSet([log for log in logs.logs if log.header.core == "kvworker"], []))


def _report(played: "Played") -> Report:
    tally = played.tally
    return Report(
        num_said=played.num_said,
        num_same=tally.num_same,
        differences=tally.differences,
        faults=tally.faults,
        num_faults=tally.num_faults,
        num_checked=tally.num_checked,
        num_seeded=played.num_seeded,
        num_audited=played.num_audited,
        num_removed=played.num_removed,
        seconds=round(played.seconds, 3),
        recorded_seconds=round(played.recorded_seconds, 3),
        notes=played.notes,
    )


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    # Short: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvr", dir=tempfile.gettempdir()) as name:
        yield Path(name)


def _keep(logs: Path, out: Path) -> None:
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in sorted(logs.iterdir()):
        (out / path.name).write_bytes(path.read_bytes())
