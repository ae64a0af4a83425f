"""What became of what a recording asked for: from the recording, and from playing it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from kvcommon import messages as msg
from kvreplay.loading import Entry
from kvworker.core import commands as work_do

#: Differences and faults that are listed; the rest is counted.
MAX_LISTED: Final = 100


class Item(NamedTuple):
    """Something that a daemon answers once."""

    #: ``lookup``, ``job``, ``plan`` or ``attach``.
    kind: str
    #: Log whose daemon answers.
    log: str
    #: ``<engine id>#<rank>``.
    engine: str
    #: Of the lookup, job or step; how many attaches there were before.
    number: int

    def __str__(self) -> str:
        """Name it for people."""
        return f"{self.kind} {self.number} of {self.engine}"


def describe(body: msgspec.Struct) -> Iterator[tuple[str, int, str]]:
    """Yield kind, number and outcome in words of everything that a message of a daemon settles."""
    if isinstance(body, msg.LookupResult):
        hits = ", ".join(str(hit.num_blocks) for hit in body.hits) or "0"
        why = f" ({body.reason})" if body.reason else ""
        yield "lookup", body.lookup_id, f"{hits} blocks{why}"
    elif isinstance(body, msg.PlanAck):
        yield "plan", body.step, "taken in"
    elif isinstance(body, msg.JobsEnded):
        for end in body.ends:
            bad = f", {len(end.failed_blocks)} blocks not" if end.failed_blocks else ""
            why = f" ({end.reason})" if end.reason else ""
            yield "job", end.job_id, f"{end.outcome.value}{bad}{why}"


def recorded(entry: Entry) -> Iterator[tuple[Item, str]]:
    """Yield what the daemon's answers in one record settle."""
    for command in entry.commands:
        if isinstance(command, work_do.SendToScheduler):
            for kind, number, what in describe(command.body):
                yield Item(kind, entry.log, command.engine, number), what


@dataclass
class Tally:
    """Recorded and played outcomes, side by side."""

    expected: dict[Item, str] = field(default_factory=dict)
    found: dict[Item, str] = field(default_factory=dict)
    #: Wrong bytes, blocks touched before their gate, answers that never came.
    faults: list[str] = field(default_factory=list)
    num_faults: int = 0
    #: Keys of all objects that are said to have been stored.
    keys: set[str] = field(default_factory=set)
    #: Blocks whose bytes were compared.
    num_checked: int = 0

    def fault(self, text: str) -> None:
        """Note something that must not happen."""
        self.num_faults += 1
        if len(self.faults) < MAX_LISTED:
            self.faults.append(text)

    @property
    def differences(self) -> list[str]:
        """Outcomes that are not as recorded, in recorded order."""
        texts = []
        for item, what in self.expected.items():
            found = self.found.get(item, "no answer")
            if found != what:
                texts.append(f"{item}: recorded {what}; now {found}")
        return texts

    @property
    def num_same(self) -> int:
        """Outcomes that are as recorded."""
        return sum(self.found.get(item) == what for item, what in self.expected.items())
