"""Counting the records of large logs without decoding them.

Only what a question needs is looked at, and where it stands in the bytes: the kind of an event and
its time stand at its beginning (fields are encoded in order, the tag first), and an id or a kind
anywhere in a record is searched for as it is encoded. Checksums are still checked. A record that is
encoded in another way than ours is counted under ``?``.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

import msgspec

from kvcommon.eventlog import Dropped, redact_id
from kvreplay.loading import DECODE_ERRORS, LogSet

_TAG: Final = b"\xa4type"
_TIME: Final = b"\xa6now_ns"
_ARRAY: Final = 0x90
_dropped: Final = msgspec.msgpack.Decoder(Dropped)
#: The tag stands within the first bytes of a record: sequence number and cause come before it.
_HEAD: Final = 192
#: Bytes that a msgpack integer begins with, and how many follow.
_INTEGERS: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}


@dataclass(frozen=True)
class Wanted:
    """Which records to count; every condition must hold."""

    #: Id of a request, whole; in logs with hashed ids the real one or its hash.
    request: str | None = None
    #: Type of the event, a command or a message, as it is written.
    kind: str | None = None
    #: Nanoseconds after the first record of all: from (with), to (without).
    from_ns: int = 0
    to_ns: int | None = None

    @property
    def needles(self) -> list[tuple[bytes, ...]]:
        """What must stand in a record: one of each of these."""
        found: list[tuple[bytes, ...]] = []
        if self.kind is not None:
            found.append((_TAG + msgspec.msgpack.encode(self.kind),))
        if self.request is not None:
            names = (self.request, redact_id(self.request))
            found.append(tuple(map(msgspec.msgpack.encode, names)))
        return found

    @property
    def is_timed(self) -> bool:
        """Times must be looked at."""
        return self.from_ns > 0 or self.to_ns is not None


@dataclass
class Summary:
    """What was counted."""

    num_records: int = 0
    num_bytes: int = 0
    #: Records that are wanted, by kind of their event.
    kinds: Counter[str] = field(default_factory=Counter)
    #: Of the wanted ones, on the clock of the first log.
    first_ns: int | None = None
    last_ns: int | None = None
    num_dropped: int = 0
    num_damaged: int = 0
    torn: list[str] = field(default_factory=list)

    @property
    def num_wanted(self) -> int:
        """How many records are wanted."""
        return sum(self.kinds.values())

    def plain(self) -> dict[str, object]:
        """What ``--json`` prints."""
        span = (self.last_ns or 0) - (self.first_ns or 0)
        return {
            "records": self.num_records,
            "bytes": self.num_bytes,
            "wanted": self.num_wanted,
            "kinds": dict(self.kinds.most_common()),
            "seconds": round(span / 1e9, 6),
            "dropped": self.num_dropped,
            "damaged": self.num_damaged,
            "torn": self.torn,
        }


def scan(logs: LogSet, wanted: Wanted | None = None) -> Summary:
    """Read all logs once, one after another, in bounded memory."""
    wanted = wanted or Wanted()
    summary = Summary()
    names: Counter[bytes] = Counter()
    start_ns = _start_ns(logs) if wanted.is_timed else 0
    for log in logs.logs:
        for reader in log.parts:
            for _, payloads in reader.batches():
                records = [one for one in payloads if one[0] >= _ARRAY]
                summary.num_records += len(records)
                summary.num_bytes += sum(map(len, records))
                if len(records) < len(payloads):
                    notes = (one for one in payloads if one[0] < _ARRAY)
                    summary.num_dropped += sum(map(_num_dropped, notes))
                kept = _filter(records, wanted, start_ns - log.shift_ns)
                _count(kept, names)
                if kept:
                    _note_times(summary, kept, log.shift_ns)
            summary.num_damaged += reader.num_damaged
            summary.torn += [reader.path.name] if reader.torn else []
    for name, number in names.items():
        summary.kinds[name.decode("utf-8", errors="replace") or "?"] += number
    return summary


def _filter(records: list[bytes], wanted: Wanted, start_ns: int) -> list[bytes]:
    for first, *others in wanted.needles:
        found = [first in one for one in records]
        for other in others:
            found = [was or other in one for was, one in zip(found, records, strict=True)]
        records = list(compress(records, found))
    if not wanted.is_timed:
        return records
    low = start_ns + wanted.from_ns
    high = None if wanted.to_ns is None else start_ns + wanted.to_ns
    is_within: Callable[[bytes], bool] = lambda one: (  # noqa: E731 - made once, called for each
        (at := time_of(one)) is not None and at >= low and (high is None or at < high)
    )
    return [one for one in records if is_within(one)]


def _count(records: Iterable[bytes], names: Counter[bytes]) -> None:
    for record in records:
        at = record.find(_TAG, 2, _HEAD) + 6
        # A fixed-length string of up to 31 bytes: longer than any name of ours.
        has_name = 6 < at <= len(record)
        names[record[at : at + (record[at - 1] & 0x1F)] if has_name else b""] += 1


def time_of(record: bytes) -> int | None:
    """Return ``now_ns`` of a record's event; None if it does not stand where we write it."""
    at = record.find(_TAG, 2, _HEAD) + 6
    if not 6 < at <= len(record):
        return None
    at += record[at - 1] & 0x1F
    if record[at : at + 7] != _TIME or len(record) < at + 16:
        return None
    first = record[at + 7]
    if first < 0x80:
        return first
    size = _INTEGERS.get(first)
    return None if size is None else int.from_bytes(record[at + 8 : at + 8 + size], "big")


def _note_times(summary: Summary, records: list[bytes], shift_ns: int) -> None:
    """Within a log records are in the order of their times."""
    first, last = time_of(records[0]), time_of(records[-1])
    if first is not None:
        known = summary.first_ns
        summary.first_ns = first + shift_ns if known is None else min(known, first + shift_ns)
    if last is not None:
        summary.last_ns = max(summary.last_ns or 0, last + shift_ns)


def _start_ns(logs: LogSet) -> int:
    times = []
    for log in logs.logs:
        for _, payloads in log.parts[0].batches():
            found = (time_of(one) for one in payloads if one[0] >= _ARRAY)
            times += [at + log.shift_ns for at in found if at is not None][:1]
            break
    return min(times, default=0)


def _num_dropped(note: bytes) -> int:
    # Typed: an untyped decoder would make objects of whatever a hostile file holds.
    try:
        return _dropped.decode(note).num_dropped
    except DECODE_ERRORS:
        return 0
