"""What a recording takes for granted: objects that the store held before it began."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcommon.keys import Namespace, fingerprint
from kvcommon.messages import Attach
from kvreplay.loading import Entry
from kvreplay.ops import key_mark
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome


@dataclass
class Needs:
    """Found by reading the daemons' logs once."""

    #: Keys that were there before anybody saved them, in the order of their first use.
    keys: dict[str, None] = field(default_factory=dict)
    #: The first attach of each namespace, by fingerprint.
    attaches: dict[str, Attach] = field(default_factory=dict)
    #: Log that it stands in.
    logs: dict[str, str] = field(default_factory=dict)

    def of(self, mark: str) -> list[str]:
        """Return the keys of one namespace."""
        return [key for key in self.keys if key_mark(key) == mark]


def find_needs(entries: Iterable[Entry]) -> Needs:
    """Read merged records of daemons.

    A record that finds or opens an object which no record before it has published tells that the
    object was there.
    """
    needs = Needs()
    asked: dict[tuple[str, int], tuple[str, ...]] = {}
    published: set[str] = set()
    for entry in entries:
        event = entry.event
        if isinstance(event, (work.KeysFound, work.GetsOpened, work.PutsOpened, work.PutsClosed)):
            keys = asked.pop((entry.log, event.op), ())
            if isinstance(event, work.PutsClosed):
                closed = zip(keys, event.ended, strict=False)
                published |= {key for key, outcome in closed if outcome is Outcome.OK}
            else:
                there = Outcome.EXISTS if isinstance(event, work.PutsOpened) else Outcome.OK
                for key, outcome in zip(keys, event.outcomes, strict=False):
                    if outcome is there and key not in published:
                        needs.keys[key] = None
        for command in entry.commands:
            if isinstance(command, (work_do.FindKeys, work_do.OpenGets, work_do.OpenPuts)):
                asked[entry.log, command.op] = command.keys
            elif isinstance(command, work_do.ClosePuts):
                asked[entry.log, command.op] = command.end
            elif isinstance(command, work_do.MapEngine):
                mark = fingerprint(command.attach.namespace)
                needs.attaches.setdefault(mark, command.attach)
                needs.logs.setdefault(mark, entry.log)
    return needs


def renamed(namespace: Namespace, word: str) -> Namespace:
    """Return the namespace under which synthetic bytes are stored: never that of real ones."""
    return Namespace(
        **{
            **{name: getattr(namespace, name) for name in namespace.__struct_fields__},
            "label": f"kvreplay-{word}",
        }
    )
