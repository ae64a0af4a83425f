"""Where records go, as configured: to files at once, or to a ring that is written on occasion."""

from pathlib import Path
from typing import Literal, Union

import msgspec

from kvcommon.eventlog.format import LogHeader
from kvcommon.eventlog.ring import Alarm, RingWriter
from kvcommon.eventlog.writer import LogWriter

#: What a core's log is written by.
LogSink = Union[LogWriter, RingWriter]


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an event log is kept."""

    #: ``on``: everything goes to files; ``ring``: the last seconds are kept in memory.
    mode: Literal["on", "ring"] = "on"
    ring_s: float = 30.0
    #: Hash request ids.
    redact: bool = False
    #: Compress closed files.
    compress: bool = False


def open_sink(
    directory: Path, header: LogHeader, options: LogOptions, alarm: Alarm | None = None
) -> LogSink:
    """Begin a log.

    Args:
        directory: where its files go.
        header: of the log; that ids are hashed is added to its facts.
        options: how it is kept.
        alarm: says which records are a reason to write a ring.

    Raises:
        ConfigError: the directory or the file cannot be made.
    """
    if options.redact:
        header = msgspec.structs.replace(header, info={**header.info, "redacted": "ids"})
    if options.mode == "ring":
        return RingWriter(
            directory, header, seconds=options.ring_s, alarm=alarm, redacted=options.redact
        )
    return LogWriter(directory, header, compressed=options.compress, redacted=options.redact)
