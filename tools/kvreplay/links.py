"""Which records belong to which request.

A request id stands only in some messages. The rest is reached through ids that those messages tie
to it: lookups, jobs, steps, operations, block hashes. Both classes read records in causal order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from kvcommon import messages as msg
from kvreplay.loading import Entry
from kvreplay.ops import (
    Job,
    ended_op,
    engine_id,
    engine_of,
    key_hash,
    keys_of,
    plan_jobs,
    started_op,
)
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work

_K = TypeVar("_K")
_V = TypeVar("_V")
_GETS: Final = (work_do.OpenGets, work_do.LoadLayers)
_PUTS: Final = (work_do.OpenPuts, work_do.WriteLayers, work_do.ClosePuts)
_WEATHER: Final = (
    sched.DaemonReady,
    sched.DaemonLost,
    sched.FenceFailed,
    sched.StoreChanged,
)
#: Ids that ``Mentions`` remembers of each kind; the oldest are forgotten first.
_MAX_REMEMBERED: Final = 200_000


#: A number that leads from a record to requests: ``lookup``, ``job`` or ``step`` of any engine, or
#: the log that it is an operation of; and the number.
Claim = tuple[str, int]


@dataclass(frozen=True)
class Touch:
    """What of a record belongs to the request."""

    event: bool
    commands: tuple[msgspec.Struct, ...]

    def __bool__(self) -> bool:
        """Anything at all belongs to the request."""
        return self.event or bool(self.commands)


@dataclass
class Surroundings:
    """What is known of engines and daemons, whatever request it matters to.

    May be shared by the links of many requests; taking in a record twice changes nothing.
    """

    #: Rank of each namespace fingerprint, of every engine in the logs.
    marks: dict[str, int] = field(default_factory=dict)
    #: Ranks whose daemon does not serve, by the log of their scheduler side.
    away: dict[str, set[int]] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Take in the next record."""
        event = entry.event
        named = getattr(event, "body", event)
        if isinstance(named, (sched.RanksKnown, msg.Hello)):
            self.marks.update({rank.fingerprint: rank.rank for rank in named.ranks})
        if isinstance(event, sched.RanksKnown):
            self.away[entry.log] = {rank.rank for rank in event.ranks}
        elif isinstance(event, sched.DaemonLost):
            self.away.setdefault(entry.log, set()).add(event.rank)
        elif isinstance(event, sched.DaemonReady):
            away = self.away.setdefault(entry.log, set())
            (away.discard if event.attached else away.add)(event.rank)


@dataclass
class RequestLinks:
    """Follows one request through merged logs."""

    request_id: str
    #: Engine that the request runs on; unknown until a daemon's record names it.
    engine: str | None = None
    #: Log of that engine's scheduler side.
    sched_log: str | None = None
    jobs: dict[int, Job] = field(default_factory=dict)
    #: Jobs by step.
    steps: dict[int, set[int]] = field(default_factory=dict)
    lookups: dict[int, msg.Lookup] = field(default_factory=dict)
    #: Lookups that have no answer yet.
    pending: set[int] = field(default_factory=set)
    #: Running operations: (log, op).
    ops: set[tuple[str, int]] = field(default_factory=set)
    #: Jobs whose blocks are still held, and whether the request itself still lives.
    alive: bool = False
    _open_jobs: set[int] = field(default_factory=set)
    #: Open get sessions: (log, key).
    _gets: set[tuple[str, str]] = field(default_factory=set)
    #: Numbers tied to the request since somebody last took them away: see ``kvreplay.routes``.
    claims: list[Claim] = field(default_factory=list)
    #: What all requests share; see ``Surroundings``.
    around: Surroundings = field(default_factory=Surroundings)

    def touch(self, entry: Entry) -> Touch:
        """Take in the next record; tell what of it belongs to the request."""
        self.around.add(entry)
        if entry.core == "kvsched":
            return self._touch_sched(entry)
        return self._touch_worker(entry)

    @property
    def is_live(self) -> bool:
        """A record that does not name the request may still belong to it."""
        return self.alive or bool(self._open_jobs or self.ops or self.pending)

    def claim_again(self) -> None:
        """Claim every number anew: the request is told of again after its end."""
        self.claims = [("lookup", number) for number in self.lookups]
        self.claims += (("job", number) for number in self.jobs)
        self.claims += (("step", number) for number in self.steps)
        self.claims += self.ops

    @property
    def is_loading(self) -> bool:
        """It has a load whose blocks are held, or an open get session."""
        return bool(self._gets) or any(self.is_load(job) for job in self._open_jobs)

    def is_load(self, job_id: int) -> bool:
        """The job is a load."""
        return isinstance(self.jobs.get(job_id), msg.LoadJob)

    def open_loads_of(self, block_ids: Iterable[int]) -> list[int]:
        """Return the loads whose blocks are still held, and that go into any of these blocks."""
        failed = set(block_ids)
        loads = [job for job in self._open_jobs if self.is_load(job)]
        return [job for job in loads if not failed.isdisjoint(self.jobs[job].block_ids)]

    def _touch_sched(self, entry: Entry) -> Touch:
        event = entry.event
        if self.sched_log not in (None, entry.log):
            return Touch(event=False, commands=())
        for command in entry.commands:
            if isinstance(command, sched_do.SendToDaemon):
                self._learn(command.body)
        found = Touch(
            event=self._is_sched_event(event),
            commands=tuple(c for c in entry.commands if self._is_sched_command(c)),
        )
        if found:
            self.sched_log = entry.log
            self.engine = self.engine or entry.engine or None
            self.alive = not isinstance(event, sched.RequestFinished) and self.alive
            self.alive = self.alive or isinstance(event, (sched.RequestAdded, sched.MatchAsked))
        for command in found.commands:
            if isinstance(command, sched_do.FreeBlocks):
                self._open_jobs.discard(command.job_id)
        return found

    def _learn(self, body: msgspec.Struct) -> None:
        """Note the ids that a message ties to the request."""
        if isinstance(body, msg.Lookup) and body.request_id == self.request_id:
            if body.lookup_id not in self.lookups:
                self.pending.add(body.lookup_id)
                self.claims.append(("lookup", body.lookup_id))
            self.lookups[body.lookup_id] = body
        elif isinstance(body, msg.StepPlan):
            for job in plan_jobs(body):
                if job.request_id == self.request_id:
                    if job.job_id not in self.jobs:
                        self._open_jobs.add(job.job_id)
                        self.claims += (("job", job.job_id), ("step", body.step))
                    self.jobs[job.job_id] = job
                    self.steps.setdefault(body.step, set()).add(job.job_id)

    def _is_sched_event(self, event: msgspec.Struct | None) -> bool:
        if isinstance(event, sched.StepScheduled):
            ids = [one.request_id for one in event.requests]
            return self.request_id in ids or self.request_id in event.preempted
        if isinstance(event, (sched.StepFinished, sched.PlanAcked)):
            # A load between steps may be told of as failed in any later one.
            invalid = getattr(event, "invalid_block_ids", ())
            return event.step in self.steps or bool(self.open_loads_of(invalid))
        if isinstance(event, sched.LookupAnswered):
            return event.result.lookup_id in self.lookups
        if isinstance(event, sched.JobsReported):
            return any(end.job_id in self.jobs for end in event.ends)
        if isinstance(event, _WEATHER):
            return self.alive or bool(self._open_jobs)
        return getattr(event, "request_id", None) == self.request_id

    def _is_sched_command(self, command: msgspec.Struct) -> bool:
        if isinstance(command, sched_do.SendToDaemon):
            return self._is_body(command.body)
        if isinstance(command, (sched_do.HoldBlocks, sched_do.FreeBlocks)):
            return command.job_id in self.jobs
        if isinstance(command, sched_do.FenceDaemon):
            return bool(self._open_jobs)
        if isinstance(command, sched_do.TellModel):
            return any(load.job_id in self.jobs for load in command.loads) or any(
                job in self.jobs for job in command.cancel
            )
        return getattr(command, "request_id", None) == self.request_id

    def _is_body(self, body: msgspec.Struct) -> bool:
        if isinstance(body, (msg.Lookup, msg.ReleaseLookup, msg.LookupResult)):
            return body.lookup_id in self.lookups
        if isinstance(body, msg.JobsEnded):
            return any(end.job_id in self.jobs for end in body.ends)
        if isinstance(body, msg.CancelJobs):
            return any(job in self.jobs for job in body.job_ids)
        if isinstance(body, (msg.Attach, msg.Detach)):
            return bool(self._open_jobs)
        return isinstance(
            body, (msg.StepPlan, msg.StepVerdict, msg.StepBegun, msg.LayersComputed, msg.PlanAck)
        ) and (body.step in self.steps)

    def _touch_worker(self, entry: Entry) -> Touch:
        event = entry.event
        if isinstance(event, work.SchedulerSaid) and self._is_ours(event):
            self._learn(event.body)
        if self.engine is None and isinstance(event, work.SchedulerSaid) and self._names(event):
            self.engine = engine_id(event.engine)
        op = ended_op(event)
        mine = op is not None and (entry.log, op) in self.ops
        if op is not None and mine:
            self.ops.discard((entry.log, op))
        if isinstance(event, (work.SchedulerSaid, work.ModelSaid)):
            mine = self._is_ours(event) and self._is_body(event.body)
        elif isinstance(event, work.PeerLost):
            mine = self._is_ours(event) and (self.alive or bool(self._open_jobs))
        commands = []
        # Others look for the same blocks too: what they ask must not be taken for ours.
        others = isinstance(event, work.SchedulerSaid) and not mine
        for command in entry.commands:
            if isinstance(command, work_do.FindKeys) and others:
                continue
            if self._is_worker_command(entry.log, command):
                commands.append(command)
                op = started_op(command)
                if op is not None:
                    self.ops.add((entry.log, op))
                    self.claims.append((entry.log, op))
                keys = {(entry.log, key) for key in keys_of(command)}
                if isinstance(command, work_do.OpenGets):
                    self._gets |= keys
                elif isinstance(command, work_do.CloseGets):
                    self._gets -= keys
        return Touch(event=mine, commands=tuple(commands))

    def _is_ours(self, value: msgspec.Struct) -> bool:
        return self.engine is None or engine_id(engine_of(value)) == self.engine

    def _names(self, event: work.SchedulerSaid) -> bool:
        """The message itself names the request."""
        body = event.body
        if isinstance(body, msg.Lookup):
            return body.request_id == self.request_id
        if isinstance(body, msg.StepPlan):
            return any(job.request_id == self.request_id for job in plan_jobs(body))
        return False

    def _is_worker_command(self, log: str, command: msgspec.Struct) -> bool:
        if isinstance(command, work_do.Cancel) or not self._is_ours(command):
            return (log, getattr(command, "op", 0)) in self.ops
        if isinstance(command, (work_do.SendToScheduler, work_do.SendToModel)):
            if isinstance(command.body, msg.JobsEnded) and self.sched_log is None:
                # Nobody else will say when the job is over.
                self._open_jobs -= {end.job_id for end in command.body.ends}
            if isinstance(command.body, msg.LookupResult):
                self.pending.discard(command.body.lookup_id)
            return self._is_body(command.body)
        if isinstance(command, work_do.PublishProgress):
            return any(self.is_load(job) for job in self.steps.get(command.step, ()))
        if isinstance(command, work_do.CloseGets):
            return any((log, key) in self._gets for key in command.keys)
        mine: set[str] = set()
        if isinstance(command, work_do.FindKeys):
            mine = self._lookup_hashes()
        elif isinstance(command, (*_GETS, *_PUTS)):
            mine = self._job_hashes(command.step, load=isinstance(command, _GETS))
        return bool(mine) and not mine.isdisjoint(_hashes(command))

    def _lookup_hashes(self) -> set[str]:
        groups = (group for one in self.pending for group in self.lookups[one].groups)
        return {block.hex() for group in groups for block in group.block_hashes}

    def _job_hashes(self, step: int, *, load: bool) -> set[str]:
        jobs = [self.jobs[job] for job in self.steps.get(step, ()) if self.is_load(job) == load]
        return {block.hex() for job in jobs for block in job.block_hashes}


class Mentions:
    """Tells for every record which requests it is about, as far as ids lead to them.

    Ids of jobs and lookups are unique within an engine only, so they are kept by engine.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self._by_id: dict[tuple[str, str, int], str] = {}
        self._by_op: dict[tuple[str, int], frozenset[str]] = {}
        self._by_hash: dict[tuple[str, str], str] = {}
        #: Engines seen, in order.
        self._engines: dict[str, None] = {}

    def of(self, entry: Entry) -> frozenset[str]:
        """Take in the next record; return the requests it is about."""
        found: set[str] = set(self._of(_engine(entry, entry.event), entry.event))
        op = ended_op(entry.event)
        if op is not None:
            found |= self._by_op.pop((entry.log, op), frozenset())
        for command in entry.commands:
            engine = _engine(entry, command)
            mine = set(self._of(engine, command))
            started = started_op(command)
            if started is not None:
                mine |= {self._by_hash.get((engine, digest), "") for digest in _hashes(command)}
                _remember(self._by_op, (entry.log, started), frozenset(mine - {""}))
            found |= mine
        return frozenset(found - {""})

    def job(self, job_id: int, among: frozenset[str] = frozenset()) -> str:
        """Return the request of a job; empty if it is not known.

        Args:
            job_id: the job.
            among: prefer these, where engines use the same number.
        """
        found = [self._by_id.get(("job", engine, job_id), "") for engine in self._engines]
        known = [request for request in found if request]
        return next((one for one in known if one in among), known[0] if known else "")

    def _of(self, engine: str, value: msgspec.Struct | None) -> Iterable[str]:
        body = getattr(value, "body", value)
        if isinstance(body, sched.LookupAnswered):
            body = body.result
        if isinstance(body, msg.Lookup):
            _remember(self._by_id, ("lookup", engine, body.lookup_id), body.request_id)
            for group in body.groups:
                self._learn_hashes(engine, group.block_hashes, body.request_id)
        if isinstance(body, msg.StepPlan):
            self._engines[engine] = None
            for job in plan_jobs(body):
                _remember(self._by_id, ("job", engine, job.job_id), job.request_id)
                self._learn_hashes(engine, job.block_hashes, job.request_id)
                yield job.request_id
        if isinstance(body, sched.StepScheduled):
            yield from (one.request_id for one in body.requests)
        if isinstance(body, (msg.JobsEnded, sched.JobsReported)):
            for end in body.ends:
                yield self._by_id.get(("job", engine, end.job_id), "")
        yield self._by_id.get(("lookup", engine, getattr(body, "lookup_id", -1)), "")
        yield self._by_id.get(("job", engine, getattr(body, "job_id", -1)), "")
        yield getattr(body, "request_id", "")

    def _learn_hashes(self, engine: str, hashes: Iterable[bytes], request_id: str) -> None:
        for block in hashes:
            _remember(self._by_hash, (engine, block.hex()), request_id)


def _engine(entry: Entry, value: msgspec.Struct | None) -> str:
    return entry.engine if entry.core == "kvsched" else engine_id(engine_of(value))


def _hashes(command: msgspec.Struct) -> set[str]:
    return {key_hash(key) for key in keys_of(command)}


def _remember(table: dict[_K, _V], key: _K, value: _V) -> None:
    if len(table) >= _MAX_REMEMBERED and key not in table:
        del table[next(iter(table))]
    table[key] = value
