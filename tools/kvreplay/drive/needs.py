"""What a recording takes for granted: objects that the store held before it began."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeGuard, Union

from kvcommon.keys import Namespace, fingerprint
from kvcommon.messages import Attach, Lookup, SaveJob, StepPlan
from kvreplay.loading import Entry
from kvreplay.ops import key_hash, key_mark, plan_jobs
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome

_Answer = Union[
    work.KeysFound, work.GetsOpened, work.PutsOpened, work.PutsClosed, work.LayersWritten
]
_ANSWERS: Final = (
    work.KeysFound,
    work.GetsOpened,
    work.PutsOpened,
    work.PutsClosed,
    work.LayersWritten,
)


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


def find_needs(entries: Iterable[Entry], only: str | None = None) -> Needs:
    """Read merged records of daemons.

    A record that finds or opens an object which no record before it has published tells that the
    object was there. One for which a put session was opened was not, whatever became of that
    session: a writer that was killed leaves no more than its open key.

    Args:
        entries: the records.
        only: what others did is not played, so whatever this request finds and has not saved
            itself is needed.
    """
    needs = Needs()
    asked: dict[tuple[str, int], tuple[str, ...]] = {}
    published: set[str] = set()
    mine = _Hashes(only)
    for entry in entries:
        event = entry.event
        mine.learn(event)
        if isinstance(event, _ANSWERS):
            keys = asked.pop((entry.log, event.op), ())
            published |= {key for key in _published(event, keys) if mine.saves(key)}
            for key in _was_there(event, keys):
                if key not in published and mine.wants(key):
                    needs.keys[key] = None
        for command in entry.commands:
            if isinstance(command, (work_do.FindKeys, work_do.OpenGets, work_do.OpenPuts)):
                asked[entry.log, command.op] = command.keys
            elif isinstance(command, work_do.ClosePuts):
                asked[entry.log, command.op] = command.end
            elif isinstance(command, work_do.WriteLayers) and command.whole:
                asked[entry.log, command.op] = command.keys
            elif isinstance(command, work_do.MapEngine):
                mark = fingerprint(command.attach.namespace)
                needs.attaches.setdefault(mark, command.attach)
                needs.logs.setdefault(mark, entry.log)
    return needs


def has_session(event: object) -> TypeGuard[work.PutsOpened]:
    """An answer tells that a put session was opened: this daemon writes layer by layer."""
    return isinstance(event, work.PutsOpened) and not event.whole and Outcome.OK in event.outcomes


def _published(event: _Answer, keys: tuple[str, ...]) -> Iterator[str]:
    """Yield what an answer says is published, with a session from its opening on, or without."""
    outcomes: tuple[Outcome, ...] = ()
    if isinstance(event, work.PutsClosed):
        outcomes = event.ended
    elif isinstance(event, work.LayersWritten) or has_session(event):
        outcomes = event.outcomes
    return (key for key, one in zip(keys, outcomes, strict=False) if one is Outcome.OK)


def _was_there(event: _Answer, keys: tuple[str, ...]) -> Iterator[str]:
    """Yield what an answer says was stored before."""
    outcomes: tuple[Outcome, ...] = ()
    there = Outcome.OK
    if isinstance(event, (work.KeysFound, work.GetsOpened, work.PutsOpened)):
        outcomes = event.outcomes
        there = Outcome.EXISTS if isinstance(event, work.PutsOpened) else Outcome.OK
    return (key for key, one in zip(keys, outcomes, strict=False) if one is there)


class _Hashes:
    """Which blocks are those of the one request that is played; without one: all are."""

    def __init__(self, only: str | None) -> None:
        self._only = only
        self._saved: set[str] = set()
        self._named: set[str] = set()

    def learn(self, event: object) -> None:
        body = event.body if isinstance(event, work.SchedulerSaid) else None
        if isinstance(body, Lookup) and body.request_id == self._only:
            self._named |= {one.hex() for group in body.groups for one in group.block_hashes}
        elif isinstance(body, StepPlan):
            for job in plan_jobs(body):
                hashes = {one.hex() for one in job.block_hashes}
                if job.request_id == self._only:
                    self._named |= hashes
                    self._saved |= hashes if isinstance(job, SaveJob) else set()

    def saves(self, key: str) -> bool:
        return self._only is None or key_hash(key) in self._saved

    def wants(self, key: str) -> bool:
        return self._only is None or key_hash(key) in self._named


def renamed(namespace: Namespace, word: str) -> Namespace:
    """Return the namespace under which synthetic bytes are stored: never that of real ones."""
    return Namespace(
        **{
            **{name: getattr(namespace, name) for name in namespace.__struct_fields__},
            "label": f"kvreplay-{word}",
        }
    )
