"""Merges logs into one causal order, holding one record of each in memory.

Within a log the order is that of its sequence numbers. Between logs it is that of the clock, which
all processes of a host share; and a record never stands before the one it names as its cause.
"""

from collections.abc import Iterator, Sequence

from kvcommon.eventlog import parse_stimulus
from kvreplay.loading import Entry, Log


def merge(logs: Sequence[Log]) -> Iterator[Entry]:
    """Yield the records of all logs in causal order."""
    streams = {log.label: iter(log) for log in logs}
    heads: dict[str, Entry] = {}
    for label, stream in streams.items():
        head = next(stream, None)
        if head is not None:
            heads[label] = head
    while heads:
        earliest = min(heads.values(), key=_order)
        entry = _first_cause(earliest, heads)
        yield entry
        head = next(streams[entry.log], None)
        if head is None:
            del heads[entry.log]
        else:
            heads[entry.log] = head


def _order(entry: Entry) -> tuple[int, str]:
    return (entry.at_ns, entry.log)


def _first_cause(entry: Entry, heads: dict[str, Entry]) -> Entry:
    """Follow causes that were not given out yet; a circle of causes is cut where it closes."""
    visited = {entry.log}
    while True:
        cause = parse_stimulus(entry.cause)
        if cause is None or cause[0] in visited:
            return entry
        log, seq = cause
        head = heads.get(log)
        if head is None or head.seq > seq:
            return entry
        visited.add(log)
        entry = head
