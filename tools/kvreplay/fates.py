"""What became of things that no record ends: a process died, or its log stops before it did."""

from collections.abc import Sequence
from typing import Final

from kvreplay.loading import Entry, Log
from kvreplay.ops import engine_id, rank_of
from kvsched.core import events as sched
from kvworker.core import events as work

#: Ends that are remembered; more would be news of long ago.
_MAX_ENDS: Final = 200_000


class Fates:
    """Reads all logs' records in causal order, and knows at their end who had died."""

    def __init__(self, logs: Sequence[Log]) -> None:
        """Note which log is whose."""
        #: Logs of both cores by the epoch of their process, which nothing else has.
        self._of_epoch = {log.header.epoch: log.label for log in logs}
        #: Epoch of the daemon of a rank, by scheduler side's log and rank.
        self._daemons: dict[tuple[str, int], int] = {}
        #: Logs whose process is known to have ended, and when that was seen.
        self._dead: dict[str, int] = {}
        #: Why a daemon gave an engine up, by the daemon's log and the engine's key.
        self._lost: dict[tuple[str, str], str] = {}
        #: Jobs whose end a scheduler side heard of: engine, rank, job.
        self._reported: dict[tuple[str, int, int], None] = {}

    def add(self, entry: Entry) -> None:
        """Take in the next record."""
        event = entry.event
        if isinstance(event, sched.DaemonReady):
            where = (entry.log, event.rank)
            if self._daemons.setdefault(where, event.epoch) != event.epoch:
                self._died(self._daemons[where], entry)
            self._daemons[where] = event.epoch
        elif isinstance(event, sched.DaemonLost) and event.dead:
            self._died(self._daemons.get((entry.log, event.rank), 0), entry)
        elif isinstance(event, sched.JobsReported):
            for end in event.ends:
                if len(self._reported) >= _MAX_ENDS:
                    del self._reported[next(iter(self._reported))]
                self._reported[entry.engine, event.rank, end.job_id] = None
        elif isinstance(event, work.PeerLost):
            self._lost[entry.log, event.engine] = event.reason
            if event.role == "scheduler":
                self._died(event.epoch, entry)

    def _died(self, epoch: int, seen: Entry) -> None:
        label = self._of_epoch.get(epoch)
        if label is not None:
            self._dead.setdefault(label, seen.at_ns)

    def has_died(self, log: str) -> bool:
        """The process of a log is known to have ended."""
        return log in self._dead

    def seen_dead_ns(self, log: str) -> int | None:
        """When somebody first saw that the process of a log has ended; None: nobody did."""
        return self._dead.get(log)

    def of(self, log: str, engine: str = "", job_id: int | None = None) -> str:
        """Say why something of a log never ended; empty if it is simply open.

        Args:
            log: label of the log.
            engine: key of the engine that it is about, if it is about one.
            job_id: the job that it is, if it is one.
        """
        if job_id is not None and (engine_id(engine), rank_of(engine), job_id) in self._reported:
            return "the engine heard of its end, before which this log stops"
        if log in self._dead:
            return "it ended with its process"
        reason = self._lost.get((log, engine))
        return "" if reason is None else f"it was dropped with its engine ({reason})"
