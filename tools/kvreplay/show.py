"""``show``: the records of logs, in causal order, filtered."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvcommon import messages as msg
from kvreplay.links import Mentions, RequestLinks
from kvreplay.loading import Entry, LogSet, plain
from kvreplay.merge import merge
from kvreplay.ops import ended_op, plan_jobs, started_op
from kvsched.core import events as sched


@dataclass(frozen=True)
class Filters:
    """What to show; every filter that is given must fit."""

    request: str | None = None
    job: int | None = None
    step: int | None = None
    #: Show also that time passed and nothing came of it.
    ticks: bool = False
    #: Type of the event, of a command, or of a message in one of them; case does not matter.
    kind: str | None = None
    #: Nanoseconds after the first record: from (with), to (without).
    from_ns: int = 0
    to_ns: int | None = None


def select(logs: LogSet, filters: Filters) -> Iterator[Entry]:
    """Yield the records that fit, in causal order."""
    links = RequestLinks(filters.request) if filters.request is not None else None
    op_steps: dict[tuple[str, int], int] = {}
    start_ns: int | None = None
    for entry in merge(logs.logs):
        start_ns = entry.at_ns if start_ns is None else start_ns
        offset_ns = entry.at_ns - start_ns
        if filters.to_ns is not None and offset_ns >= filters.to_ns:
            return
        steps = _steps_of(entry, op_steps)
        # Links read every record, whatever the other filters say.
        touched = links is None or bool(links.touch(entry))
        if not touched or offset_ns < filters.from_ns:
            continue
        parts = (entry.event, *entry.commands)
        if entry.kind == "Ticked" and not (entry.commands or entry.fault or filters.ticks):
            continue
        if filters.job is not None and not any(filters.job in jobs_of(part) for part in parts):
            continue
        if filters.step is not None and filters.step not in steps:
            continue
        if filters.kind is not None and filters.kind.lower() not in kinds_of(entry):
            continue
        yield entry


def _steps_of(entry: Entry, op_steps: dict[tuple[str, int], int]) -> set[int]:
    """Return the steps a record is about; ``op_steps`` holds those of running operations."""
    steps = {step_of(part) for part in (entry.event, *entry.commands)}
    op = ended_op(entry.event)
    if op is not None:
        steps.add(op_steps.pop((entry.log, op), None))
    for command in entry.commands:
        op, step = started_op(command), step_of(command)
        if op is not None and step is not None:
            op_steps[entry.log, op] = step
    return {step for step in steps if step is not None}


def as_plain(entry: Entry, mentions: Mentions) -> dict[str, object]:
    """What ``--json`` prints of a record."""
    return {
        "log": entry.log,
        "core": entry.core,
        "seq": entry.seq,
        "at_ns": entry.at_ns,
        "cause": entry.cause,
        "requests": sorted(mentions.of(entry)),
        "event": plain(entry.event),
        "commands": plain(entry.commands),
        "fault": entry.fault,
        "problem": entry.problem,
    }


def step_of(value: msgspec.Struct | None) -> int | None:
    """Return the step that an event, a command or the message in it is about."""
    body = getattr(value, "body", value)
    step = getattr(body, "step", None)
    return step if isinstance(step, int) else None


def jobs_of(value: msgspec.Struct | None) -> set[int]:
    """Return every job that an event, a command or the message in it names."""
    body = getattr(value, "body", value)
    jobs: set[int] = set()
    if isinstance(body, msg.StepPlan):
        jobs |= {job.job_id for job in plan_jobs(body)}
    if isinstance(body, (msg.JobsEnded, sched.JobsReported)):
        jobs |= {end.job_id for end in body.ends}
    for name in ("job_ids", "tainted", "cancel"):
        found = getattr(body, name, ())
        jobs |= set(found) if isinstance(found, tuple) else set()
    jobs |= {load.job_id for load in getattr(body, "loads", ())}
    job_id = getattr(body, "job_id", None)
    return jobs | ({job_id} if isinstance(job_id, int) else set())


def kinds_of(entry: Entry) -> set[str]:
    """Return the names, in small letters, of all types in a record."""
    values = (entry.event, *entry.commands)
    bodies = (getattr(value, "body", None) for value in values)
    return {type(value).__name__.lower() for value in (*values, *bodies) if value is not None}
