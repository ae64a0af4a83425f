"""Rules about which bytes go where: blocks, hits, and what is published.

As in ``rules``, nothing is judged on the ground of a record that is missing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from kvcommon import messages as msg
from kvreplay.loading import Entry
from kvreplay.ops import ended_op, key_group, key_hash, key_mark, plan_jobs
from kvreplay.rules import Rule
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome

_Found = Iterator[tuple[str, int | None]]
_MOVES = (work_do.LoadLayers, work_do.WriteLayers)


@dataclass(frozen=True)
class _Job:
    """A job on one daemon."""

    job_id: int
    is_load: bool
    step: int
    #: Group and hash → blocks.
    blocks: dict[tuple[int, str], frozenset[int]]


def _blocks_of(job: msg.LoadJob | msg.SaveJob) -> dict[tuple[int, str], frozenset[int]]:
    found: dict[tuple[int, str], frozenset[int]] = {}
    for block_id, block_hash in zip(job.block_ids, job.block_hashes, strict=False):
        key = (job.group, block_hash.hex())
        found[key] = found.get(key, frozenset()) | {block_id}
    return found


class BlocksAsPlanned(Rule):
    """A daemon reads and writes only the blocks that a plan names for these bytes, and only from
    the plan until it has said that the job ended."""

    name = "blocks-as-planned"

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen."""
        super().__init__(whole)
        #: Open jobs by log and engine key, then id.
        self._jobs: dict[tuple[str, str], dict[int, _Job]] = {}
        #: The same by step.
        self._steps: dict[tuple[str, str, int], dict[int, _Job]] = {}
        #: Running copies by log and op, with the jobs that they are for; and by these jobs.
        self._running: dict[tuple[str, int], tuple[str, frozenset[int]]] = {}
        self._moving: dict[tuple[str, str, int], set[int]] = {}

    def check(self, entry: Entry) -> _Found:
        """Note plans and ends; judge every copy."""
        event = entry.event
        if entry.core != "kvworker" or entry.log not in self._whole:
            return
        op = ended_op(event)
        if op is not None:
            engine, served = self._running.pop((entry.log, op), ("", frozenset()))
            for job_id in served:
                self._moving.get((entry.log, engine, job_id), set()).discard(op)
        if isinstance(event, work.SchedulerSaid) and isinstance(event.body, msg.StepPlan):
            jobs = self._jobs.setdefault((entry.log, event.engine), {})
            step = self._steps.setdefault((entry.log, event.engine, event.body.step), {})
            for job in plan_jobs(event.body):
                jobs[job.job_id] = step[job.job_id] = _Job(
                    job.job_id, isinstance(job, msg.LoadJob), event.body.step, _blocks_of(job)
                )
        for command in entry.commands:
            if isinstance(command, _MOVES):
                yield from self._moved(entry.log, command)
            elif isinstance(command, work_do.SendToScheduler) and isinstance(
                command.body, msg.JobsEnded
            ):
                yield from self._ended(entry.log, command.engine, command.body.ends)

    def _moved(self, log: str, command: work_do.LoadLayers | work_do.WriteLayers) -> _Found:
        is_load = isinstance(command, work_do.LoadLayers)
        jobs = [
            job
            for job in self._steps.get((log, command.engine, command.step), {}).values()
            if job.is_load == is_load
        ]
        served: set[int] = set()
        for key, block_id in zip(command.keys, command.block_ids, strict=False):
            wanted = (command.group, key_hash(key))
            mine = {job.job_id for job in jobs if block_id in job.blocks.get(wanted, ())}
            served |= mine
            if not mine:
                yield from self._stray(command, jobs, wanted, block_id)
        self._running[log, command.op] = (command.engine, frozenset(served))
        for job_id in served:
            self._moving.setdefault((log, command.engine, job_id), set()).add(command.op)

    @staticmethod
    def _stray(
        command: work_do.LoadLayers | work_do.WriteLayers,
        jobs: Sequence[_Job],
        wanted: tuple[int, str],
        block_id: int,
    ) -> _Found:
        verb = "loads into" if isinstance(command, work_do.LoadLayers) else "saves from"
        text = f"op {command.op} {verb} block {block_id} for hash {wanted[1][:16]}"
        for job in jobs:
            if wanted in job.blocks:
                right = ", ".join(map(str, sorted(job.blocks[wanted])))
                yield f"{text}, but job {job.job_id} names block {right}", job.job_id
                return
        yield f"{text}, which no open job of step {command.step} names", None

    def _ended(self, log: str, engine: str, ends: Sequence[msg.JobEnd]) -> _Found:
        jobs = self._jobs.get((log, engine), {})
        for end in ends:
            job = jobs.pop(end.job_id, None)
            if job is not None:
                key = (log, engine, job.step)
                self._steps.get(key, {}).pop(job.job_id, None)
                if not self._steps.get(key, True):
                    del self._steps[key]
            for op in sorted(self._moving.pop((log, engine, end.job_id), ())):
                text = f"job {end.job_id} is said to have ended while op {op} still moves its"
                yield f"{text} blocks", end.job_id


class HitsComplete(Rule):
    """What a lookup calls stored was found for every rank and group."""

    name = "hits-complete"

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen."""
        super().__init__(whole)
        #: Lookups being answered: by log, engine key and lookup; the keys' op.
        self._asked: dict[tuple[str, int], tuple[str, tuple[str, ...]]] = {}
        self._ranks: dict[tuple[str, str], int] = {}
        self._lookups: dict[tuple[str, str, int], msg.Lookup] = {}

    def check(self, entry: Entry) -> _Found:
        """Join lookups with what the store said; judge the answers."""
        event = entry.event
        if entry.core != "kvworker" or entry.log not in self._whole:
            return
        found: set[str] = set()
        op = ended_op(event)
        if isinstance(event, work.SchedulerSaid):
            if isinstance(event.body, msg.Hello):
                self._ranks[entry.log, event.engine] = len(event.body.ranks)
            elif isinstance(event.body, msg.Lookup):
                self._lookups[entry.log, event.engine, event.body.lookup_id] = event.body
        elif isinstance(event, work.KeysFound) and op is not None:
            _, keys = self._asked.pop((entry.log, op), ("", ()))
            pairs = zip(keys, event.outcomes, strict=False)
            found = {key for key, outcome in pairs if outcome is Outcome.OK}
        for command in entry.commands:
            if isinstance(command, work_do.FindKeys):
                self._asked[entry.log, command.op] = (command.engine, command.keys)
            elif isinstance(command, work_do.SendToScheduler) and isinstance(
                command.body, msg.LookupResult
            ):
                yield from self._answer(entry.log, command.engine, command.body, found)

    def _answer(self, log: str, engine: str, result: msg.LookupResult, found: set[str]) -> _Found:
        lookup = self._lookups.pop((log, engine, result.lookup_id), None)
        if lookup is None:
            return
        num_ranks = self._ranks.get((log, engine), 1)
        marks: dict[tuple[int, str], set[str]] = {}
        for key in found:
            marks.setdefault((key_group(key), key_hash(key)), set()).add(key_mark(key))
        wanted = {group.group: group.block_hashes for group in lookup.groups}
        for hit in result.hits:
            for number, block in enumerate(wanted.get(hit.group, ())[: hit.num_blocks]):
                have = len(marks.get((hit.group, block.hex()), ()))
                if have < num_ranks:
                    text = f"lookup {result.lookup_id} calls {hit.num_blocks} blocks stored, but "
                    text += f"block {number + 1} was found for {have} of {num_ranks} ranks"
                    yield text, None
                    break


@dataclass
class _Put:
    """An open put session."""

    group: int
    #: Layers written without a gap from the first.
    num_layers: int = 0


@dataclass
class _Rank:
    """What is known of one engine's rank on one daemon."""

    #: Layers by group.
    num_layers: dict[int, int] = field(default_factory=dict)
    puts: dict[str, _Put] = field(default_factory=dict)


class PublishedComplete(Rule):
    """An object is published only after every layer of it was written."""

    name = "published-complete"

    def __init__(self, whole: frozenset[str]) -> None:
        """Start with nothing seen."""
        super().__init__(whole)
        self._ranks: dict[tuple[str, str], _Rank] = {}
        self._writes: dict[tuple[str, int], work_do.WriteLayers] = {}

    def check(self, entry: Entry) -> _Found:
        """Count layers written; judge what is published."""
        if entry.core != "kvworker" or entry.log not in self._whole:
            return
        if isinstance(entry.event, work.LayersWritten):
            self._written(entry.log, entry.event)
        for command in entry.commands:
            yield from self._command(entry.log, command)

    def _command(self, log: str, command: msgspec.Struct) -> _Found:
        if isinstance(command, work_do.MapEngine):
            groups = command.attach.layout.groups
            rank = self._ranks.setdefault((log, command.engine), _Rank())
            rank.num_layers = {group.group: len(group.layers) for group in groups}
        elif isinstance(command, work_do.OpenPuts):
            rank = self._ranks.setdefault((log, command.engine), _Rank())
            rank.puts.update({key: _Put(command.group) for key in command.keys})
        elif isinstance(command, work_do.WriteLayers):
            self._writes[log, command.op] = command
            due = self._ranks.get((log, command.engine), _Rank()).num_layers.get(command.group, 0)
            if command.whole and (command.first_layer or command.end_layer < due):
                text = f"op {command.op} publishes layers {command.first_layer} to "
                yield f"{text}{command.end_layer - 1} of {due} (step {command.step})", None
        elif isinstance(command, work_do.ClosePuts):
            rank = self._ranks.get((log, command.engine), _Rank())
            for key in command.end:
                put = rank.puts.get(key)
                due = rank.num_layers.get(put.group, 0) if put else 0
                if put is not None and put.num_layers < due:
                    text = f"block {key_hash(key)[:16]} is published with {put.num_layers} of "
                    yield f"{text}{due} layers written (step {command.step})", None
            for key in command.end + command.revoke:
                rank.puts.pop(key, None)

    def _written(self, log: str, event: work.LayersWritten) -> None:
        command = self._writes.pop((log, event.op), None)
        if command is None:
            return
        rank = self._ranks.get((log, command.engine), _Rank())
        for key, outcome in zip(command.keys, event.outcomes, strict=False):
            put = rank.puts.get(key)
            if put and outcome is Outcome.OK and command.first_layer <= put.num_layers:
                put.num_layers = max(put.num_layers, command.end_layer)
