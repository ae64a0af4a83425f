"""``verify``: runs every log's events through a fresh core and compares every command; then checks
the rules over the merged logs.

A log can be replayed if it begins at its start and no record is missing. Replay stops at the first
difference, or where records are missing.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final

import msgspec

from kvcommon.eventlog import Core
from kvcommon.eventlog.redact import FAULT_TEXT, redact_fault
from kvreplay.judge import Judgement, check_rules
from kvreplay.links import Mentions
from kvreplay.loading import DECODE_ERRORS, Entry, Log, LogSet, plain
from kvreplay.words import command_text, event_text

AnyCore = Core[Any, Any]
#: Makes a fresh core from the configuration in a log's header.
MakeCore = Callable[[msgspec.Raw], AnyCore]

_encoder: Final = msgspec.msgpack.Encoder()


class Result(str, Enum):
    """How far a log could be replayed."""

    SAME = "same"
    DIFFERENT = "different"
    #: The same as far as it could be replayed, which is not to the end.
    INCOMPLETE = "incomplete"
    #: Not replayed at all.
    NOT_REPLAYED = "not-replayed"


@dataclass
class Replay:
    """What became of one log."""

    log: str
    core: str
    result: Result
    num_records: int = 0
    #: Why it is not ``SAME``, in words.
    why: str = ""
    #: Of the first difference.
    seq: int = 0
    event: object = None
    event_text: str = ""
    expected: list[str] = field(default_factory=list)
    actual: list[str] = field(default_factory=list)
    expected_raw: object = None
    actual_raw: object = None
    #: A request that the difference is about.
    request: str = ""


@dataclass(frozen=True)
class Verdict:
    """Everything that ``verify`` found."""

    replays: list[Replay]
    judgement: Judgement
    problems: dict[str, list[str]]
    unreadable: list[str]

    @property
    def status(self) -> int:
        """Exit status: 0 all is well; 1 a difference or a broken rule; 2 not all was checked."""
        if self.judgement.violations or any(r.result is Result.DIFFERENT for r in self.replays):
            return 1
        done = all(replay.result is Result.SAME for replay in self.replays)
        return 0 if done and self.replays and not self.unreadable else 2

    def plain(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "status": self.status,
            "replays": [{**asdict(one), "result": one.result.value} for one in self.replays],
            "violations": [asdict(one) for one in self.judgement.violations],
            "more_violations": self.judgement.num_more,
            "open": [asdict(one) for one in self.judgement.open],
            "problems": self.problems,
            "unreadable": self.unreadable,
        }


def make_sched_core(config: msgspec.Raw) -> AnyCore:
    """Make a fresh scheduler side's core."""
    from kvsched.core.core import CoreConfig, SchedCore

    known = msgspec.msgpack.decode(config, type=CoreConfig)
    # Checking itself changes no answer and takes long; recorded faults are looked for all the same.
    return SchedCore(msgspec.structs.replace(known, validate=False))


def make_worker_core(config: msgspec.Raw) -> AnyCore:
    """Make a fresh daemon's core."""
    from kvworker.core.core import CoreConfig, WorkerCore

    known = msgspec.msgpack.decode(config, type=CoreConfig)
    return WorkerCore(msgspec.structs.replace(known, validate=False))


CORES: Final[Mapping[str, MakeCore]] = {"kvsched": make_sched_core, "kvworker": make_worker_core}


def verify(logs: LogSet, cores: Mapping[str, MakeCore] = CORES) -> Verdict:
    """Replay every log and check the rules.

    Args:
        logs: what ``open_logs`` found.
        cores: how to make a fresh core of each kind.
    """
    replays = [replay(log, cores[log.header.core]) for log in logs.logs]
    # Replaying may have stopped early; the rules need to know about gaps anywhere.
    for log, one in zip(logs.logs, replays, strict=True):
        for _ in log:
            pass
        if log.has_gaps and one.result is Result.SAME:
            one.result = Result.INCOMPLETE
            one.why = f"records behind record {one.num_records} are missing or cannot be read"
    whole = frozenset(log.label for log in logs.logs if log.begins_at_start and not log.has_gaps)
    judgement = check_rules(logs.logs, whole)
    problems = {log.label: log.problems for log in logs.logs if log.problems}
    return Verdict(replays, judgement, problems, logs.unreadable)


def replay(log: Log, make_core: MakeCore) -> Replay:
    """Run one log's events through a fresh core."""
    found = Replay(log.label, log.header.core, Result.SAME)
    if not log.begins_at_start:
        found.result = Result.NOT_REPLAYED
        why = "is not in a ring" if "first_seq" in log.header.info else "was rotated away"
        found.why = f"the beginning of the log {why}, so there is nothing to start from"
        return found
    try:
        core = make_core(log.header.config)
    except DECODE_ERRORS as error:
        found.result = Result.NOT_REPLAYED
        found.why = f"the configuration in the header is not one of this version: {error}"
        return found
    mentions = Mentions()
    for entry in log:
        requests = mentions.of(entry)
        if entry.seq != found.num_records + 1:
            found.result = Result.INCOMPLETE
            found.why = f"records are missing before record {entry.seq}"
            break
        if entry.event is None or entry.problem:
            found.result = Result.INCOMPLETE
            found.why = f"record {entry.seq}: {entry.problem}"
            break
        if not _same(entry, core, found):
            found.request = min(requests, default="")
            break
        found.num_records += 1
    return found


def _same(entry: Entry, core: AnyCore, found: Replay) -> bool:
    """Handle one event; False, with the difference in ``found``, if the answer is another."""
    fault = ""
    actual: list[msgspec.Struct] = []
    try:
        actual = core.handle(entry.event)
        if entry.fault:
            core.validate()
    except Exception as error:  # noqa: BLE001 - the outermost loop of the replay: faults are results
        actual = []
        fault = f"{type(error).__name__}: {error}"[:2000]
    if _same_fault(entry.fault, fault) and _equal(entry, actual):
        return True
    found.result = Result.DIFFERENT
    found.why = f"record {entry.seq}: the core of this version answers something else"
    found.seq = entry.seq
    found.event, found.event_text = plain(entry.event), event_text(entry.event)
    found.expected_raw, found.actual_raw = plain(entry.commands), plain(actual)
    found.expected = [*map(command_text, entry.commands)]
    found.actual = [*map(command_text, actual)]
    found.expected += [f"fails: {entry.fault}"] if entry.fault else []
    found.actual += [f"fails: {fault}"] if fault else []
    return False


def _same_fault(expected: str, actual: str) -> bool:
    if expected.endswith(f": {FAULT_TEXT}"):
        return redact_fault(actual) == expected
    # What follows the first line of a fault may name objects by their addresses.
    return actual.partition("\n")[0] == expected.partition("\n")[0]


def _equal(entry: Entry, actual: list[msgspec.Struct]) -> bool:
    encoded = _encoder.encode(actual)
    # A log of an older version may spell out what is a default now: compare what it means too.
    return encoded == bytes(entry.raw.commands) or encoded == _encoder.encode(entry.commands)
