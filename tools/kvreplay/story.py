"""``story``: one request across all logs, in causal order, ending in one sentence."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final

from kvcommon.eventlog import redact_id
from kvreplay.conclude import sentence
from kvreplay.facts import Collector, Facts
from kvreplay.links import Mentions, RequestLinks, Touch
from kvreplay.loading import Entry, LogSet, plain
from kvreplay.merge import merge
from kvreplay.words import command_text, event_text, millis

#: A story is cut behind so many lines; its sentence is made from all records.
MAX_LINES: Final = 5000
#: At most so many request ids are offered when a prefix is not unique.
MAX_CANDIDATES: Final = 20


class NoSuchRequestError(Exception):
    """No request, or more than one, begins with the given text; the message lists some."""


@dataclass(frozen=True)
class Line:
    """One line of a story: an event, or one command that it led to."""

    #: Since the request's first record.
    offset_ns: int
    process: str
    seq: int
    #: ``event`` or ``command``.
    what: str
    kind: str
    text: str
    #: The record that led to this; empty if it came from outside kvferry.
    cause: str


@dataclass(frozen=True)
class Story:
    """Everything that ``story`` prints."""

    request_id: str
    lines: list[Line]
    num_left_out: int
    facts: Facts
    sentence: str
    #: When its first record was; 0 if it has none.
    start_ns: int = 0

    def plain(self) -> dict[str, object]:
        """What ``--json`` prints."""
        facts = {
            **asdict(self.facts),
            "jobs": [
                {**asdict(job), "ends": {str(rank): plain(end) for rank, end in job.ends.items()}}
                for job in self.facts.jobs.values()
            ],
            "outcome": self.facts.outcome,
            "reason": self.facts.reason,
        }
        return {
            "request": self.request_id,
            "lines": [asdict(line) for line in self.lines],
            "left_out": self.num_left_out,
            "facts": facts,
            "sentence": self.sentence,
        }


def find_request(logs: LogSet, prefix: str) -> str:
    """Return the one request id that is ``prefix`` or begins with it.

    In logs with hashed ids, the whole of the real id finds its request too.

    Raises:
        NoSuchRequestError: there is none, or several.
    """
    found: set[str] = set()
    mentions = Mentions()
    hashed = redact_id(prefix)
    for entry in merge(logs.logs):
        requests = mentions.of(entry)
        if hashed in requests:
            return hashed
        found |= {one for one in requests if one.startswith(prefix)}
        if prefix in found:
            return prefix
        if len(found) > MAX_CANDIDATES:
            break
    if len(found) == 1:
        return found.pop()
    if not found:
        raise NoSuchRequestError(f"no request in these logs begins with {prefix!r}")
    some = ", ".join(sorted(found)[:MAX_CANDIDATES])
    raise NoSuchRequestError(f"several requests begin with {prefix!r}: {some}")


def tell(logs: LogSet, request_id: str) -> Story:
    """Tell the story of a request that ``find_request`` found."""
    links = RequestLinks(request_id)
    collector = Collector(links)
    lines = Lines(MAX_LINES)
    for entry in merge(logs.logs):
        touch = links.touch(entry)
        if touch:
            collector.add(entry, touch)
            lines.add(entry, touch)
    facts = collector.facts
    return Story(request_id, lines.lines, lines.num_left_out, facts, sentence(facts))


class Lines:
    """A story's lines, record by record, up to a bound.

    vLLM asks about a waiting request in every step. A question that is asked, and answered, as the
    one before is counted in its line instead of repeated.
    """

    def __init__(self, max_lines: int) -> None:
        """No lines yet."""
        self.lines: list[Line] = []
        self.num_left_out = 0
        #: When the first record was.
        self.start_ns: int | None = None
        self._max_lines = max_lines
        #: The newest record: its process and words, where its lines begin, how often it came.
        self._said: tuple[str, ...] = ()
        self._first: Line | None = None
        self._index = 0
        self._count = 1

    def add(self, entry: Entry, touch: Touch) -> None:
        """Take in the next record."""
        self.start_ns = entry.at_ns if self.start_ns is None else self.start_ns
        new = list(_lines_of(entry, touch, entry.at_ns - self.start_ns))
        said = (entry.log, *(line.text for line in new))
        if said == self._said and self._first is not None:
            self._repeat(new[0])
            return
        self._said, self._first, self._index, self._count = said, new[0], len(self.lines), 1
        kept = new[: max(0, self._max_lines - len(self.lines))]
        self.lines += kept
        self.num_left_out += len(new) - len(kept)

    def _repeat(self, newest: Line) -> None:
        first = self._first
        if first is None or self._index >= len(self.lines):
            return
        self._count += 1
        until = millis(newest.offset_ns)
        text = f"{first.text}; {self._count} times, until +{until}"
        self.lines[self._index] = replace(first, text=text)


def _lines_of(entry: Entry, touch: Touch, offset: int) -> Iterator[Line]:
    """Yield the lines of one record: the event, and what of its commands is the request's."""
    text = event_text(entry.event)
    if entry.fault:
        text += f"; the core failed: {entry.fault}"
    yield Line(offset, entry.log, entry.seq, "event", entry.kind, text, entry.cause)
    for command in touch.commands:
        kind = type(command).__name__
        text = command_text(command)
        yield Line(offset, entry.log, entry.seq, "command", kind, text, entry.stimulus)
