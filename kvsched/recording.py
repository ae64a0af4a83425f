"""The scheduler side's core with its event log.

A connector that was not told of a log directory writes beside its daemon's log if that daemon keeps
one and is on this host (``Welcome.event_log``). Until a daemon has said so, events wait in memory
(bounded): a log without its beginning could not be replayed.
"""

import platform
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

import kvcommon
from kvcommon.config import ConnectorConfig
from kvcommon.eventlog import LogSink, Recorder, RingWriter, make_header, open_sink
from kvcommon.ids import EngineId, Epoch
from kvcommon.messages import JobOutcome
from kvsched.core.commands import SchedCommand
from kvsched.core.core import CoreConfig, SchedCore
from kvsched.core.events import DaemonLost, JobsReported, SchedEvent, StoreChanged

#: Events kept while no daemon has said where to log; past that the log is given up.
MAX_WAITING = 4096

Record = tuple[int, str, msgspec.Struct, Sequence[msgspec.Struct], str]


def alarm(event: msgspec.Struct, _commands: Sequence[msgspec.Struct]) -> str:
    """Say why an event is a reason to write a log that is kept in memory; empty: it is none."""
    if isinstance(event, DaemonLost):
        return f"daemon of rank {event.rank} lost: {event.reason}"
    if isinstance(event, StoreChanged) and not event.up:
        return f"store down: {event.reason}"
    if isinstance(event, JobsReported):
        for end in event.ends:
            if end.outcome is JobOutcome.FAILED:
                return f"job {end.job_id} failed on rank {event.rank}: {end.reason}"
    return ""


class WaitingWriter:
    """Stands in for a log until a directory is known, or for ever."""

    def __init__(self) -> None:
        """Start with nothing waiting."""
        self._waiting: list[Record] | None = []
        self.writer: LogSink | None = None
        #: Something was written since the last flush.
        self.dirty = False

    def record(
        self,
        seq: int,
        cause: str,
        event: msgspec.Struct,
        commands: Sequence[msgspec.Struct],
        fault: str = "",
    ) -> None:
        """Write, or keep for later, or (too much is waiting) give up."""
        if self.writer is not None:
            self.dirty = True
            self.writer.record(seq, cause, event, commands, fault)
        elif self._waiting is not None:
            self._waiting.append((seq, cause, event, commands, fault))
            if len(self._waiting) > MAX_WAITING:
                self._waiting = None

    @property
    def wants(self) -> bool:
        """A directory would still be of use."""
        return self.writer is None and self._waiting is not None

    def flush(self) -> None:
        """Hand buffered records to the operating system: an engine may be killed any time.

        A log that is kept in memory looks here whether somebody wants it written.
        """
        if self.writer is not None and (self.dirty or isinstance(self.writer, RingWriter)):
            self.dirty = False
            self.writer.flush()

    def begin(self, writer: LogSink) -> None:
        """Write what waited, and from now on directly."""
        for record in self._waiting or ():
            writer.record(*record)
        self._waiting = None
        self.writer = writer
        self.dirty = True


class SchedulerLog:
    """The core, recorded."""

    def __init__(
        self, config: ConnectorConfig, engine: EngineId, epoch: Epoch, core_config: CoreConfig
    ) -> None:
        """Make the core; open the log if the configuration names a directory."""
        self.core = SchedCore(core_config)
        # Operators choose engine ids; a log's name takes fewer characters.
        short = re.sub(r"[^A-Za-z0-9]", "", engine)[:8] or "engine"
        name = f"kvsched-{short}-{epoch & 0xFFFFFFFF:08x}"
        self._header = make_header(
            "kvsched",
            name,
            epoch,
            core_config,
            versions={"kvferry": kvcommon.__version__, "python": platform.python_version()},
            info={"engine": engine},
        )
        self._options = config.log_options
        self._waiting = WaitingWriter()
        self._recorder = Recorder[SchedEvent, SchedCommand](
            self.core, self._waiting, name, validate=config.validate
        )
        #: Directory of the log; empty while there is none.
        self.place = ""
        self.offer(config.event_log)

    @property
    def stimulus(self) -> str:
        """Names the event being handled, for the ``cause`` of what is sent because of it."""
        return self._recorder.stimulus

    def offer(self, directory: str) -> None:
        """Log to this directory unless a log is open already; empty: nothing offered."""
        if directory and self._waiting.wants:
            self._waiting.begin(open_sink(Path(directory), self._header, self._options, alarm))
            self.place = directory

    def handle(self, event: SchedEvent, cause: str = "") -> Sequence[SchedCommand]:
        """Let the core handle one event, and record it."""
        return self._recorder.handle(event, cause)

    def flush(self) -> None:
        """Hand buffered records to the operating system."""
        self._waiting.flush()

    def close(self) -> None:
        """Write out and close the log."""
        if self._waiting.writer is not None:
            self._waiting.writer.close()
