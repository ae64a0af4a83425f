"""Finds event logs, puts their parts together, and decodes their records.

A record whose event or commands this version does not know, or that is malformed, is kept as an
``Entry`` with a ``problem``; nothing here raises for what stands in a log.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from kvcommon.errors import LogFormatError
from kvcommon.eventlog import LogHeader, LogReader, RawRecord, read_log, split_file_name
from kvsched.core.commands import SchedCommand
from kvsched.core.events import SchedEvent
from kvworker.core.commands import WorkerCommand
from kvworker.core.events import WorkerEvent

#: At most so many problems of one log are kept in words.
MAX_PROBLEMS: Final = 100
DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)

_events: Final[dict[str, "msgspec.msgpack.Decoder[Any]"]] = {
    "kvsched": msgspec.msgpack.Decoder(SchedEvent),
    "kvworker": msgspec.msgpack.Decoder(WorkerEvent),
}
_commands: Final[dict[str, "msgspec.msgpack.Decoder[Any]"]] = {
    "kvsched": msgspec.msgpack.Decoder(list[SchedCommand]),
    "kvworker": msgspec.msgpack.Decoder(list[WorkerCommand]),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of one log."""

    #: Label of the log, its name unless two logs share one.
    log: str
    #: ``kvsched`` or ``kvworker``.
    core: str
    seq: int
    cause: str
    #: Monotonic time on the clock of the first log's host, never less than the record before.
    at_ns: int
    #: None if it could not be decoded.
    event: msgspec.Struct | None
    commands: tuple[msgspec.Struct, ...]
    fault: str
    #: Why the record, or a part of it, could not be decoded; else empty.
    problem: str
    raw: RawRecord
    #: Engine of a scheduler side's log, as its header says; else empty.
    engine: str = ""

    @property
    def kind(self) -> str:
        """Name of the event's type."""
        return "?" if self.event is None else type(self.event).__name__

    @property
    def stimulus(self) -> str:
        """How other records name this one as their cause."""
        return f"{self.log}:{self.seq}"


@dataclass
class Log:
    """All parts of one log, oldest first. Iterate to read; ``problems`` is then complete."""

    label: str
    parts: list[LogReader]
    #: Added to the log's clock to bring it to the clock of the first log.
    shift_ns: int = 0
    #: What is wrong with the files, in words.
    problems: list[str] = field(default_factory=list)
    #: Records are missing somewhere, or cannot be read (not: a torn last one).
    has_gaps: bool = False

    @property
    def header(self) -> LogHeader:
        """Header of the oldest part."""
        return self.parts[0].header

    @property
    def begins_at_start(self) -> bool:
        """The log's first record is still there."""
        return self.header.part == 0 and self.header.info.get("first_seq", "1") == "1"

    def __iter__(self) -> Iterator[Entry]:
        """Yield every record in order."""
        self.problems = []
        self.has_gaps = False
        last_seq, last_ns = 0, 0
        expected_part = self.header.part
        if not self.begins_at_start:
            first = self.header.info.get("first_seq")
            self._problem(
                f"it begins with record {first}: a ring keeps the last seconds only"
                if first
                else f"parts 0 to {expected_part - 1} are gone (rotated away)"
            )
        for reader in self.parts:
            if reader.header.part != expected_part:
                self.has_gaps = True
                self._problem(f"part {expected_part} is missing")
            expected_part = reader.header.part + 1
            for raw in reader:
                if raw.seq != last_seq + 1 and (last_seq or self.begins_at_start):
                    self.has_gaps = True
                    self._problem(f"record {raw.seq} follows record {last_seq}")
                entry = self._entry(raw, last_ns)
                if entry.problem:
                    self._problem(f"record {raw.seq}: {entry.problem}")
                last_seq, last_ns = raw.seq, entry.at_ns
                yield entry
            self._file_problems(reader)

    def _entry(self, raw: RawRecord, last_ns: int) -> Entry:
        core = self.header.core
        problem = ""
        event: msgspec.Struct | None = None
        commands: tuple[msgspec.Struct, ...] = ()
        try:
            event = _events[core].decode(raw.event)
        except DECODE_ERRORS as error:
            problem = f"unknown or malformed event: {error}"
        try:
            commands = tuple(_commands[core].decode(raw.commands))
        except DECODE_ERRORS as error:
            problem = problem or f"unknown or malformed command: {error}"
        at_ns = last_ns
        if event is not None:
            at_ns = max(last_ns, int(getattr(event, "now_ns", 0)) + self.shift_ns)
        return Entry(
            log=self.label,
            core=core,
            seq=raw.seq,
            cause=raw.cause,
            at_ns=at_ns,
            event=event,
            commands=commands,
            fault=raw.fault,
            problem=problem,
            raw=raw,
            engine=self.header.info.get("engine", "") if core == "kvsched" else "",
        )

    def _file_problems(self, reader: LogReader) -> None:
        name = reader.path.name
        if reader.torn:
            self._problem(f"{name}: the last record is torn (normal after a crash)")
        # Behind the last record that can be read, no number shows that one is missing.
        self.has_gaps |= bool(reader.num_damaged or reader.dropped)
        for damage in reader.damage:
            self._problem(
                f"{name}: {damage.num_bytes} bytes at offset {damage.offset} skipped: "
                f"{damage.reason}"
            )
        for dropped in reader.dropped:
            self._problem(
                f"{name}: {dropped.num_dropped} records ({dropped.first_seq} to "
                f"{dropped.last_seq}) could not be written"
            )

    def _problem(self, text: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)


@dataclass
class LogSet:
    """Logs that belong together."""

    logs: list[Log]
    #: Files that are no readable logs, and why.
    unreadable: list[str]

    def named(self, label: str) -> Log | None:
        """Return the log with this label."""
        return next((log for log in self.logs if log.label == label), None)


def open_logs(paths: Iterable[Path]) -> LogSet:
    """Open files, and every log file in directories.

    Args:
        paths: files or directories; directories are not searched deeper.

    Returns:
        The logs, ordered by name. What cannot be read is named in ``unreadable``.
    """
    groups: dict[tuple[str, int], dict[int, LogReader]] = {}
    unreadable: list[str] = []
    for path in _files(paths, unreadable):
        reader = _read(path, unreadable)
        if reader is not None:
            header = reader.header
            groups.setdefault((header.name, header.epoch), {})[header.part] = reader
    logs: list[Log] = []
    for (name, _), parts in sorted(groups.items()):
        taken = sum(1 for log in logs if log.header.name == name)
        label = f"{name}~{taken + 1}" if taken else name
        logs.append(Log(label, [parts[part] for part in sorted(parts)]))
    for log in logs[1:]:
        log.shift_ns = _shift_ns(logs[0].header, log.header)
    return LogSet(logs, unreadable)


def plain(value: object) -> object:
    """Turn events, commands and results into what ``json`` can write (bytes as hex)."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, msgspec.Struct):
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def _read(path: Path, unreadable: list[str]) -> LogReader | None:
    try:
        return read_log(path)
    except LogFormatError as error:
        unreadable.append(str(error))
    except OSError as error:
        unreadable.append(f"{path}: {error.strerror or error}")
    return None


def _files(paths: Iterable[Path], unreadable: list[str]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = [entry for entry in path.iterdir() if split_file_name(entry.name)]
            if not found:
                unreadable.append(f"{path}: no event logs (*.kvlog) in this directory")
            yield from sorted(found)
        else:
            yield path


def _shift_ns(first: LogHeader, other: LogHeader) -> int:
    """Logs of one boot share a clock; else only the wall clocks can be compared."""
    if first.info.get("boot", "") == other.info.get("boot", ""):
        return 0
    return (other.wall_ns - other.mono_ns) - (first.wall_ns - first.mono_ns)
