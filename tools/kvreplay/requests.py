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
from kvreplay.links import Mentions, RequestLinks, Surroundings
from kvreplay.loading import Entry, LogSet
from kvreplay.merge import merge
from kvreplay.story import Lines, Story

#: At most so many requests are told of, the first ones; others are counted.
MAX_REQUESTS: Final = 20_000
#: Lines of one story, where all are told.
MAX_LINES: Final = 400


@dataclass
class _Telling:
    links: RequestLinks
    collector: Collector
    lines: Lines = field(default_factory=lambda: Lines(MAX_LINES))

    def add(self, entry: Entry) -> None:
        touch = self.links.touch(entry)
        if not touch:
            return
        self.collector.add(entry, touch)
        self.lines.add(entry, touch)


def read_requests(logs: LogSet, max_requests: int = MAX_REQUESTS) -> list[Story]:
    """Tell of every request, in the order in which they are first named."""
    tellings: dict[str, _Telling] = {}
    living: dict[str, _Telling] = {}
    around = Surroundings()
    mentions = Mentions()
    for entry in merge(logs.logs):
        for request in sorted(mentions.of(entry)):
            if request in living:
                continue
            if request not in tellings and len(tellings) < max_requests:
                links = RequestLinks(request, around=around)
                tellings[request] = _Telling(links, Collector(links))
            if request in tellings:
                living[request] = tellings[request]
        around.add(entry)
        for request, telling in list(living.items()):
            telling.add(entry)
            if not telling.links.is_live:
                del living[request]
    return list(_stories(tellings))


def _stories(tellings: dict[str, _Telling]) -> Iterator[Story]:
    for request, one in tellings.items():
        facts = one.collector.facts
        text = sentence(facts)
        lines = one.lines
        start_ns = lines.start_ns or 0
        yield Story(request, lines.lines, lines.num_left_out, facts, text, start_ns)
