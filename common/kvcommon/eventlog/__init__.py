"""The event log: what a core was told and what it answered, one file per process.

``Recorder`` wraps a core, ``LogWriter`` writes, ``read_log`` reads. The format and its guarantees
are in ``docs/eventlog.md``. A log is untrusted data: reading it executes nothing.
"""

from kvcommon.eventlog.format import (
    FORMAT_VERSION,
    MAX_PAYLOAD_BYTES,
    Damage,
    Dropped,
    LogHeader,
    RawRecord,
    log_file_name,
    make_header,
    parse_stimulus,
    split_file_name,
    stimulus,
)
from kvcommon.eventlog.reader import LogReader, read_log
from kvcommon.eventlog.recorder import Core, Recorder, Writer
from kvcommon.eventlog.redact import redact_id
from kvcommon.eventlog.ring import RingWriter, ask_for_dumps
from kvcommon.eventlog.sink import LogOptions, LogSink, open_sink
from kvcommon.eventlog.writer import LogWriter

__all__ = [
    "FORMAT_VERSION",
    "MAX_PAYLOAD_BYTES",
    "Core",
    "Damage",
    "Dropped",
    "LogHeader",
    "LogOptions",
    "LogReader",
    "LogSink",
    "LogWriter",
    "RawRecord",
    "Recorder",
    "RingWriter",
    "Writer",
    "ask_for_dumps",
    "log_file_name",
    "make_header",
    "open_sink",
    "parse_stimulus",
    "read_log",
    "redact_id",
    "split_file_name",
    "stimulus",
]
