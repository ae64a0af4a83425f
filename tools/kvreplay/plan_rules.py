"""Rules about what a scheduler side plans: whose blocks, what was found, what is tainted; and that
daemons leave alone what it has given back.

As in ``rules``, nothing is judged on the ground of a record that is missing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvcommon import messages as msg
from kvreplay.loading import Entry
from kvreplay.ops import Job, ended_op, engine_id, key_hash, plan_jobs
from kvreplay.rules import Rule
from kvreplay.words import spans
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do

_Found = Iterator[tuple[str, int | None]]
#: Lookups and steps that are remembered of a log.
_MAX_REMEMBERED: Final = 10_000


def _plans(entry: Entry) -> Iterator[msg.StepPlan]:
    """Yield the plan of a record; every rank gets the same one."""
    for command in entry.commands:
        if isinstance(command, sched_do.SendToDaemon) and isinstance(command.body, msg.StepPlan):
            yield command.body
            return


@dataclass
class _Request:
    """What vLLM has said of one request."""

    hashes: list[bytes] = field(default_factory=list)
    #: Its blocks from the first on; None: not known.
    table: list[int] | None = None
    #: The blocks that were given to it when it was admitted, by hash: where a load goes.
    admitted: dict[bytes, int] = field(default_factory=dict)


class PlansAsGiven(Rule):
    """A job moves each block's bytes to or from the block that vLLM gave the request for them; and
    the verdict on a step names every save whose request had a block that was not loaded."""

    name = "plans-as-given"

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen."""
        super().__init__(whole)
        #: By log and request id.
        self._requests: dict[tuple[str, str], _Request] = {}
        #: Blocks of the requests of a step's saves when they were planned, by log and step.
        self._saves: dict[tuple[str, int], dict[int, frozenset[int]]] = {}

    def check(self, entry: Entry) -> _Found:
        """Follow the blocks of every request; judge plans and verdicts."""
        if entry.core != "kvsched" or entry.log not in self._whole:
            return
        self._event(entry.log, entry.event)
        for plan in _plans(entry):
            for job in plan_jobs(plan):
                yield from self._job(entry.log, plan.step, job)
        if isinstance(entry.event, sched.StepFinished):
            yield from self._finished(entry, entry.event)

    def _event(self, log: str, event: msgspec.Struct | None) -> None:
        if isinstance(event, sched.RequestAdded):
            self._requests[log, event.request_id] = _Request(list(event.block_hashes))
        elif isinstance(event, sched.MatchAsked):
            request = self._requests.setdefault((log, event.request_id), _Request())
            if event.block_hashes:
                request.hashes = list(event.block_hashes)
        elif isinstance(event, sched.BlocksAllocated):
            request = self._requests.setdefault((log, event.request_id), _Request())
            request.table = list(event.block_ids)
            if event.num_external_tokens:
                request.admitted = dict(zip(request.hashes, event.block_ids, strict=False))
        elif isinstance(event, sched.StepScheduled):
            self._scheduled(log, event)

    def _scheduled(self, log: str, event: sched.StepScheduled) -> None:
        for request_id in event.preempted:
            self._requests.setdefault((log, request_id), _Request()).table = None
        for one in event.requests:
            request = self._requests.setdefault((log, one.request_id), _Request())
            if one.replace:
                request.table = list(one.block_ids)
            elif request.table is not None:
                request.table += one.block_ids
            request.hashes += one.new_block_hashes

    def _job(self, log: str, step: int, job: Job) -> _Found:
        request = self._requests.get((log, job.request_id))
        if request is None:
            return
        given = request.admitted
        if isinstance(job, msg.SaveJob):
            given = dict(zip(request.hashes, request.table or (), strict=False))
            tables = self._saves.setdefault((log, step), {})
            tables[job.job_id] = frozenset(request.table or ()) - {0}
            while len(self._saves) > _MAX_REMEMBERED:
                del self._saves[next(iter(self._saves))]
        for block_id, block_hash in zip(job.block_ids, job.block_hashes, strict=False):
            right = given.get(block_hash, block_id)
            if right != block_id:
                verb = "load into" if isinstance(job, msg.LoadJob) else "save from"
                text = f"job {job.job_id} is to {verb} block {block_id} for hash "
                text += f"{block_hash.hex()[:16]}, for which vLLM gave block {right}"
                yield text, job.job_id

    def _finished(self, entry: Entry, event: sched.StepFinished) -> _Found:
        saves = self._saves.pop((entry.log, event.step), {})
        for command in entry.commands:
            body = getattr(command, "body", None)
            if not isinstance(body, msg.StepVerdict) or body.step != event.step:
                continue
            for job_id, table in saves.items():
                bad = table.intersection(event.invalid_block_ids)
                if bad and job_id not in body.tainted:
                    text = f"step {event.step} did not load blocks {spans(sorted(bad))}, but job "
                    yield f"{text}{job_id} of a request with them is not tainted", job_id
            return


class LoadsAsFound(Rule):
    """Only what its lookup found is loaded, and no two jobs load into one block."""

    name = "loads-as-found"

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen."""
        super().__init__(whole)
        #: By log and lookup: what was asked for, then what of it was found.
        self._asked: dict[tuple[str, int], tuple[bytes, ...]] = {}
        self._found: dict[tuple[str, int], frozenset[bytes]] = {}
        #: Jobs that hold a block, by log and block; and the blocks of each job.
        self._holders: dict[tuple[str, int], set[int]] = {}

    def check(self, entry: Entry) -> _Found:
        """Note answers and holds; judge loads."""
        if entry.core != "kvsched" or entry.log not in self._whole:
            return
        event = entry.event
        if isinstance(event, sched.LookupAnswered):
            self._answered(entry.log, event.result)
        loads: dict[int, msg.LoadJob] = {}
        for plan in _plans(entry):
            loads = {job.job_id: job for job in plan.loads}
        for job in loads.values():
            found = self._found.get((entry.log, job.lookup_id))
            if found is not None and not found.issuperset(job.block_hashes):
                number = sum(one not in found for one in job.block_hashes)
                text = f"job {job.job_id} is to load {number} blocks that lookup {job.lookup_id} "
                yield f"{text}has not found", job.job_id
        for command in entry.commands:
            if isinstance(command, sched_do.HoldBlocks):
                yield from self._hold(entry.log, command, is_load=command.job_id in loads)
            elif isinstance(command, sched_do.FreeBlocks):
                self._free(entry.log, command)
            elif isinstance(command, sched_do.SendToDaemon) and isinstance(
                command.body, msg.Lookup
            ):
                hashes = tuple(one for group in command.body.groups for one in group.block_hashes)
                self._asked[entry.log, command.body.lookup_id] = hashes

    def _answered(self, log: str, result: msg.LookupResult) -> None:
        hashes = self._asked.pop((log, result.lookup_id), None)
        if hashes is None or len(result.hits) > 1:
            return
        number = sum(hit.num_blocks for hit in result.hits)
        self._found[log, result.lookup_id] = frozenset(hashes[:number])
        while len(self._found) > _MAX_REMEMBERED:
            del self._found[next(iter(self._found))]

    def _hold(self, log: str, command: sched_do.HoldBlocks, *, is_load: bool) -> _Found:
        for block_id in command.block_ids:
            holders = self._holders.setdefault((log, block_id), set())
            if is_load and holders - {command.job_id}:
                text = f"job {command.job_id} is to load into block {block_id}, which job "
                yield f"{text}{spans(sorted(holders))} still holds", command.job_id
            holders.add(command.job_id)

    def _free(self, log: str, command: sched_do.FreeBlocks) -> None:
        for block_id in command.block_ids:
            holders = self._holders.get((log, block_id), set())
            holders.discard(command.job_id)
            if not holders:
                self._holders.pop((log, block_id), None)


class ReleasedLeftAlone(Rule):
    """No daemon moves a job's bytes after the scheduler side has given its blocks back."""

    name = "released-left-alone"

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen."""
        super().__init__(whole)
        #: Jobs whose blocks were given back, by engine.
        self._released: dict[str, set[int]] = {}
        #: Jobs of an engine by the hashes that they move, by log, engine key and step.
        self._jobs: dict[tuple[str, str, int], dict[str, set[int]]] = {}
        #: Running copies by log and op: engine and jobs.
        self._running: dict[tuple[str, int], tuple[str, frozenset[int]]] = {}

    def check(self, entry: Entry) -> _Found:
        """Note what is given back; judge copies that begin or end behind that."""
        if entry.core == "kvsched":
            self._scheduler(entry)
            return
        op = ended_op(entry.event)
        engine, jobs = self._running.pop((entry.log, op or 0), ("", frozenset()))
        for job_id in sorted(jobs & self._released.get(engine, set())):
            yield f"op {op} of job {job_id} ends after its blocks were given back", job_id
        body = getattr(entry.event, "body", None)
        if isinstance(body, msg.StepPlan):
            key = (entry.log, str(getattr(entry.event, "engine", "")), body.step)
            places = self._jobs.setdefault(key, {})
            for job in plan_jobs(body):
                for one in job.block_hashes:
                    places.setdefault(one.hex(), set()).add(job.job_id)
            while len(self._jobs) > _MAX_REMEMBERED:
                del self._jobs[next(iter(self._jobs))]
        for command in entry.commands:
            if isinstance(command, (work_do.LoadLayers, work_do.WriteLayers)):
                yield from self._moves(entry.log, command)

    def _scheduler(self, entry: Entry) -> None:
        released = self._released.setdefault(entry.engine, set())
        for plan in _plans(entry):
            released -= {job.job_id for job in plan_jobs(plan)}
        for command in entry.commands:
            if isinstance(command, sched_do.FreeBlocks):
                released.add(command.job_id)

    def _moves(self, log: str, command: work_do.LoadLayers | work_do.WriteLayers) -> _Found:
        places = self._jobs.get((log, command.engine, command.step), {})
        named = [places.get(key_hash(key), set()) for key in command.keys]
        engine = engine_id(command.engine)
        released = self._released.get(engine, set())
        # A block that several jobs name is nobody's for sure.
        jobs = frozenset(job_id for one in named if len(one) == 1 for job_id in one)
        self._running[log, command.op] = (engine, jobs)
        for job_id in sorted(jobs & released):
            yield f"op {command.op} begins after the blocks of job {job_id} were given back", job_id
