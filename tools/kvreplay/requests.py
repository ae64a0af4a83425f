"""The stories of all requests of some logs, read once.

A record is handed to the requests that it names, and to those that live and that its numbers lead
to: what touches a request without naming it (a verdict, a lost daemon) does so while it lives. Work
is in proportion to what is told of.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvreplay.conclude import sentence
from kvreplay.facts import Collector
from kvreplay.links import Mentions, RequestLinks, Surroundings
from kvreplay.loading import Entry, LogSet
from kvreplay.merge import merge
from kvreplay.routes import Routes
from kvreplay.story import Lines, Story

#: At most so many requests are told of, the first ones; others are counted.
MAX_REQUESTS: Final = 20_000
#: Lines of one story, where all are told.
MAX_LINES: Final = 400


class Stories(list[Story]):
    """Stories in the order in which their requests are first named."""

    #: Requests beyond the bound, which are only counted.
    num_left_out = 0


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


def read_requests(logs: LogSet, max_requests: int = MAX_REQUESTS) -> Stories:
    """Tell of every request, up to a bound."""
    left_out: set[str] = set()
    tellings: dict[str, _Telling] = {}
    living: dict[str, _Telling] = {}
    around = Surroundings()
    mentions = Mentions()
    routes = Routes()
    for entry in merge(logs.logs):
        named = mentions.of(entry)
        for request in sorted(named):
            if request in living:
                continue
            if request not in tellings and len(tellings) < max_requests:
                links = RequestLinks(request, around=around)
                tellings[request] = _Telling(links, Collector(links))
            if request in tellings:
                living[request] = tellings[request]
                living[request].links.claim_again()
            else:
                left_out.add(request)
        around.add(entry)
        led = routes.of(entry)
        for request in list(living) if led is None else named | led:
            telling = living.get(request)
            if telling is None:
                continue
            telling.add(entry)
            if telling.links.is_live:
                routes.follow(telling.links)
            else:
                del living[request]
                routes.forget(request)
    stories = Stories(_stories(tellings))
    stories.num_left_out = len(left_out)
    return stories


def _stories(tellings: dict[str, _Telling]) -> Iterator[Story]:
    for request, one in tellings.items():
        facts = one.collector.facts
        text = sentence(facts)
        lines = one.lines
        start_ns = lines.start_ns or 0
        yield Story(request, lines.lines, lines.num_left_out, facts, text, start_ns)
