"""The stories of all requests of some logs, read once.

A record is handed to the requests that it names, and to those that still live: what touches a
request without naming it (a verdict, a lost daemon) does so while it does. Work is in proportion to
the records times the requests that live at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvreplay.conclude import sentence
from kvreplay.facts import Collector
from kvreplay.links import Mentions, RequestLinks
from kvreplay.loading import Entry, LogSet
from kvreplay.merge import merge
from kvreplay.story import Line, Story, lines_of

#: At most so many requests are told of, the first ones; others are counted.
MAX_REQUESTS: Final = 20_000
#: Lines of one story, where all are told.
MAX_LINES: Final = 400


@dataclass
class _Telling:
    links: RequestLinks
    collector: Collector
    lines: list[Line] = field(default_factory=list)
    num_left_out: int = 0
    start_ns: int | None = None

    def add(self, entry: Entry) -> None:
        touch = self.links.touch(entry)
        if not touch:
            return
        self.collector.add(entry, touch)
        self.start_ns = entry.at_ns if self.start_ns is None else self.start_ns
        for line in lines_of(entry, touch, entry.at_ns - self.start_ns):
            if len(self.lines) < MAX_LINES:
                self.lines.append(line)
            else:
                self.num_left_out += 1


def read_requests(logs: LogSet, max_requests: int = MAX_REQUESTS) -> list[Story]:
    """Tell of every request, in the order in which they are first named."""
    tellings: dict[str, _Telling] = {}
    living: dict[str, _Telling] = {}
    marks: dict[str, int] = {}
    mentions = Mentions()
    for entry in merge(logs.logs):
        for request in sorted(mentions.of(entry)):
            if request in living:
                continue
            if request not in tellings and len(tellings) < max_requests:
                links = RequestLinks(request, marks=marks)
                tellings[request] = _Telling(links, Collector(links))
            if request in tellings:
                living[request] = tellings[request]
        RequestLinks("", marks=marks).learn_marks(entry)
        for request, telling in list(living.items()):
            telling.add(entry)
            if not telling.links.is_live:
                del living[request]
    return list(_stories(tellings))


def _stories(tellings: dict[str, _Telling]) -> Iterator[Story]:
    for request, one in tellings.items():
        facts = one.collector.facts
        text = sentence(facts)
        yield Story(request, one.lines, one.num_left_out, facts, text, one.start_ns or 0)
