"""A small vLLM and small daemons around the scheduler side's core, to find what playbooks do not.

The vLLM has a block pool with reference counts and a prefix cache that hands out blocks before
they are computed, chunked prefill, preemption, async scheduling (two steps in flight, with
deferred frees), synchronous and asynchronous loads, and both failure policies. Every block holds
what was really written to it on each rank, so that a wrong byte under a valid key is seen when it
is published.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from kvcommon.messages import (
    GroupHit,
    JobEnd,
    JobOutcome,
    LoadJob,
    Lookup,
    LookupResult,
    ResetStore,
    SaveJob,
    StepPlan,
    StepVerdict,
)
from kvsched.core.commands import (
    FreeBlocks,
    HoldBlocks,
    ModelLoad,
    SchedCommand,
    SendToDaemon,
    TellModel,
)
from kvsched.core.events import (
    JobsReported,
    LookupAnswered,
    PlanAcked,
    RequestAdded,
    ResetAsked,
    ScheduledRequest,
)
from tests.support.schedplay import Play, hashes, verdicts

SIZE = 4
POOL = 18
CHUNK = 9
BUDGET = 16
MAX_TOKENS = 40

#: What a block holds: per token text, position and era, or None for a wrong value. Text and
#: position say it all, because a right value depends on all positions before it. The era is that
#: of the oldest value it was made from; a reset begins a new one, as new weights would.
Slots = list[tuple[str, int, int] | None]


def right(text: str, index: int, era: int) -> Slots:
    """What block ``index`` of a text holds when all is well."""
    return [(text, position, era) for position in range(index * SIZE, (index + 1) * SIZE)]


@dataclasses.dataclass
class Request:
    """VLLM's request."""

    name: str
    text: str
    num_prompt: int
    num_tokens: int
    max_tokens: int
    status: str = "waiting"
    computed: int = 0
    placeholders: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    #: Outputs of steps planned before this changed are thrown away.
    generation: int = 0
    told_hashes: int = 0
    load_failed: bool = False
    recved: bool = False

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return hashes(self.num_tokens // SIZE, self.text)


@dataclasses.dataclass
class Part:
    """One request of a step."""

    request: Request
    blocks: list[int]
    start: int
    count: int
    samples: bool
    generation: int


@dataclasses.dataclass
class Step:
    """A step in flight."""

    number: int
    parts: list[Part]
    tell: TellModel | None
    executed: bool = False
    invalid: set[int] = dataclasses.field(default_factory=set)
    #: Blocks that become free when it is finished.
    frees: list[int] = dataclasses.field(default_factory=list)


class Pool:
    """Block pool and prefix cache."""

    def __init__(self) -> None:
        self.refs = [0] * POOL
        self.refs[0] = 1
        self.free = list(range(1, POOL))
        self.cached: dict[bytes, int] = {}

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def hold(self, blocks: Iterable[int]) -> None:
        """References of a job: only blocks that somebody owns may be given to a job."""
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} is free"
            self.refs[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
            assert self.refs[block] >= 0
            if self.refs[block] == 0:
                self.free.append(block)

    def take(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            assert self.refs[block] == 0
            self.refs[block] = 1
        self.cached = {h: b for h, b in self.cached.items() if b not in taken}
        return taken

    def cache(self, request: Request, num_tokens: int) -> None:
        for block_hash, block in zip(
            request.hashes[: num_tokens // SIZE], request.blocks, strict=False
        ):
            self.cached.setdefault(block_hash, block)

    def hit(self, request: Request) -> list[int]:
        found = []
        for block_hash in request.hashes[: (request.num_tokens - 1) // SIZE]:
            if block_hash not in self.cached:
                break
            found.append(self.cached[block_hash])
        return found


class Daemon:
    """One rank's daemon, with the part of the store that it fills and its rank's memory."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.epoch = 10 + rank
        self.alive = True
        self.reachable = True
        self.memory: list[Slots] = [[None] * SIZE for _ in range(POOL)]
        self.store: dict[bytes, Slots] = {}
        self.loads: dict[int, LoadJob] = {}
        self.saves: dict[int, tuple[int, SaveJob]] = {}
        #: Save job → what was read: hash → content.
        self.read: dict[int, dict[bytes, Slots]] = {}
        self.outbox: list[JobEnd] = []
        self.acks: list[int] = []

    def take_plan(self, plan: StepPlan) -> None:
        self.acks.append(plan.step)
        for load in plan.loads:
            self.loads[load.job_id] = load
        for save in plan.saves:
            self.saves[save.job_id] = (plan.step, save)

    def load(self, job_id: int, *, fail: bool) -> set[int]:
        """Carry out a load; return the blocks that failed."""
        job = self.loads.pop(job_id)
        failed = set()
        for block, block_hash in zip(job.block_ids, job.block_hashes, strict=True):
            data = self.store.get(block_hash)
            if data is None or (fail and block == job.block_ids[-1]):
                failed.add(block)
                self.memory[block] = [None] * SIZE
            else:
                self.memory[block] = list(data)
        outcome = JobOutcome.FAILED if failed else JobOutcome.DONE
        self.outbox.append(
            JobEnd(job_id=job_id, outcome=outcome, failed_blocks=tuple(sorted(failed)))
        )
        return failed

    def cancel(self, job_id: int) -> set[int]:
        job = self.loads.pop(job_id)
        self.outbox.append(JobEnd(job_id=job_id, outcome=JobOutcome.CANCELLED))
        return set(job.block_ids)

    def read_save(self, job_id: int) -> None:
        """Read the blocks of a save, unless their key is stored or open already."""
        _, job = self.saves[job_id]
        opened = {h for data in self.read.values() for h in data}
        self.read[job_id] = {
            block_hash: list(self.memory[block])
            for block, block_hash in zip(job.block_ids, job.block_hashes, strict=True)
            if block_hash not in self.store and block_hash not in opened
        }

    def end_save(self, job_id: int, outcome: JobOutcome) -> None:
        del self.saves[job_id]
        self.read.pop(job_id, None)
        self.outbox.append(JobEnd(job_id=job_id, outcome=outcome))

    def judge(self, verdict: StepVerdict, known: dict[bytes, tuple[str, int]], era: int) -> None:
        """Publish or revoke what the step's saves have written."""
        for job_id in [j for j, (step, _) in self.saves.items() if step == verdict.step]:
            if job_id in verdict.tainted:
                self.end_save(job_id, JobOutcome.CANCELLED)
                continue
            if job_id not in self.read:
                self.read_save(job_id)
            data = self.read[job_id]
            for block_hash, slots in data.items():
                text, index = known[block_hash]
                assert slots == right(text, index, era), f"wrong bytes published: job {job_id}"
            self.store.update(data)
            self.end_save(job_id, JobOutcome.DONE if data else JobOutcome.SKIPPED)

    def die(self) -> None:
        self.alive = False
        self.loads.clear()
        self.saves.clear()
        self.read.clear()
        self.outbox.clear()
        self.acks.clear()


class Sim:
    """VLLM, its connector's shell, and a daemon per rank."""

    def __init__(
        self, *, ranks: int, depth: int, policy: str, load: str, save_decode: bool, held: int
    ) -> None:
        safe = depth == 1 or policy == "fail"
        self.play = Play(
            ranks=ranks,
            ready=False,
            block_size=SIZE,
            num_blocks=POOL,
            load=load,
            save_decode=save_decode,
            sync_is_safe=safe,
            max_held_blocks=held,
        )
        self.depth = depth
        self.policy = policy
        self.pool = Pool()
        self.daemons = [Daemon(rank) for rank in range(ranks)]
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.steps: list[Step] = []
        self.number = 0
        self.era = 0
        self.count = 0
        self.preempted: list[str] = []
        self.lookups: list[Lookup] = []
        self.known: dict[bytes, tuple[str, int]] = {}
        for text in "ABC":
            for index, block_hash in enumerate(hashes(2 * MAX_TOKENS // SIZE, text)):
                self.known[block_hash] = (text, index)
        #: Asynchronous loads that the model sides wait for: job → (load, ranks still open).
        self.model_loads: dict[int, tuple[ModelLoad, set[int]]] = {}
        self.invalid: set[int] = set()
        self.recved: list[str] = []
        self.judged: set[int] = set()
        self.with_saves: set[int] = set()
        self.play.ready(epoch=0)
        for daemon in self.daemons:
            self.play.daemon(daemon.rank, epoch=daemon.epoch)

    # What the core answers.

    def carry_out(self, commands: Sequence[SchedCommand]) -> None:
        for command in commands:
            if isinstance(command, HoldBlocks):
                self.pool.hold(command.block_ids)
            elif isinstance(command, FreeBlocks):
                self.pool.give_back(command.block_ids)
            elif isinstance(command, SendToDaemon):
                self.send(self.daemons[command.rank], command.body)

    def send(self, daemon: Daemon, body: object) -> None:
        if not daemon.alive or not daemon.reachable:
            return
        if isinstance(body, StepPlan):
            daemon.take_plan(body)
        elif isinstance(body, StepVerdict):
            daemon.judge(body, self.known, self.era)
        elif isinstance(body, Lookup):
            self.lookups.append(body)
        elif isinstance(body, ResetStore):
            daemon.store.clear()

    def seed(self, text: str, count: int) -> None:
        """The beginning of a text is in the store already."""
        for index, block_hash in enumerate(hashes(count, text)):
            for daemon in self.daemons:
                daemon.store[block_hash] = right(text, index, self.era)

    # VLLM's front end.

    def add(self, text: str, length: int, max_new: int) -> None:
        self.count += 1
        request = Request(f"r{self.count}", text, length, length, length + max_new)
        self.requests[request.name] = request
        self.waiting.append(request)
        request.told_hashes = len(request.hashes)
        self.carry_out(
            self.play.say(
                RequestAdded(
                    now_ns=self.play.now_ns,
                    request_id=request.name,
                    num_tokens=length,
                    block_hashes=request.hashes,
                )
            )
        )

    def finish(self, request: Request) -> None:
        """Any end of a request. Blocks of an asynchronous load are kept until it has ended."""
        self.carry_out(self.play.finish(request.name))
        if request.status == "remote" and not request.recved:
            request.status = "aborted"
        else:
            request.status = "finished"
            self.free(request)
            del self.requests[request.name]
        request.generation += 1
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    def free(self, request: Request) -> None:
        """Deferred while a step is in flight, which may still write there."""
        if self.steps:
            self.steps[-1].frees += request.blocks
        else:
            self.pool.give_back(request.blocks)
        request.blocks = []

    def preempt(self, request: Request) -> None:
        self.free(request)
        request.computed = request.placeholders = 0
        request.generation += 1
        request.status = "waiting"
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.preempted.append(request.name)

    # One step.

    def schedule(self, *, shrink: bool) -> None:
        """Plan a step: running requests, then waiting ones unless somebody was preempted."""
        assert len(self.steps) < self.depth
        self.number += 1
        parts: list[Part] = []
        fresh: dict[str, list[int] | None] = {}
        num_preempted = len(self.preempted)
        for request in list(self.running):
            if request in self.running:
                self._schedule_running(request, parts, fresh)
        if len(self.preempted) == num_preempted:
            for request in list(self.waiting):
                if not self._schedule_waiting(request, parts, fresh, shrink=shrink):
                    break
        parts = [part for part in parts if part.request.status == "running"]
        told = self._told(parts, fresh)
        commands: list[SchedCommand] = []
        if told or self.preempted or self.play.core.wants_step:
            commands = self.play.step(self.number, *told, preempted=tuple(self.preempted))
        self.preempted = []
        tell = next((c for c in commands if isinstance(c, TellModel)), None)
        self.steps.append(Step(self.number, parts, tell))
        self.carry_out(commands)
        if tell is not None and tell.saves:
            self.with_saves.add(self.number)
        for part in parts:
            part.request.computed += part.count

    def _told(
        self, parts: list[Part], fresh: dict[str, list[int] | None]
    ) -> list[ScheduledRequest]:
        told = []
        for part in parts:
            request = part.request
            if request.name not in self.play.core.active:
                continue
            new_blocks = fresh[request.name]
            told.append(
                ScheduledRequest(
                    request_id=request.name,
                    num_computed_tokens=part.start,
                    num_scheduled_tokens=part.count,
                    replace=new_blocks is None,
                    block_ids=tuple(request.blocks if new_blocks is None else new_blocks),
                    new_block_hashes=request.hashes[request.told_hashes :],
                )
            )
            request.told_hashes = len(request.hashes)
        return told

    def _part(self, request: Request, count: int) -> Part:
        total = request.num_tokens + request.placeholders
        samples = request.computed + count == total
        if samples:
            request.placeholders += 1
        return Part(request, request.blocks, request.computed, count, samples, request.generation)

    def _schedule_running(
        self, request: Request, parts: list[Part], fresh: dict[str, list[int] | None]
    ) -> None:
        left = BUDGET - sum(part.count for part in parts)
        total = request.num_tokens + request.placeholders
        count = min(CHUNK, left, total - request.computed)
        if count <= 0 or total > request.max_tokens:
            return
        need = -(-(request.computed + count) // SIZE) - len(request.blocks)
        while (taken := self.pool.take(max(0, need))) is None:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return
        request.blocks = request.blocks + taken
        fresh[request.name] = taken
        parts.append(self._part(request, count))
        self.pool.cache(request, min(request.computed + count, request.num_tokens))

    def _schedule_waiting(
        self,
        request: Request,
        parts: list[Part],
        fresh: dict[str, list[int] | None],
        *,
        shrink: bool,
    ) -> bool:
        """Return False to stop looking at the queue."""
        left = BUDGET - sum(part.count for part in parts)
        if left <= 0:
            return False
        if request.status == "remote":
            if not request.recved:
                return True
            self._loaded(request)
        local: list[int] = []
        external, asynchronous = 0, False
        if request.computed == 0:
            local = self.pool.hit(request)
            match = self._match(request, len(local) * SIZE)
            if match is None:
                return True
            external, asynchronous = match
            if shrink and external > SIZE:
                external -= external % SIZE or SIZE
            self.pool.touch(local)
        before = request.computed or len(local) * SIZE + external
        count = 0 if asynchronous and external else min(CHUNK, left, request.num_tokens - before)
        have = len(request.blocks) if request.computed else len(local)
        taken = self.pool.take(max(0, -(-(before + count) // SIZE) - have))
        if taken is None:
            self.pool.give_back(local)
            return False
        request.blocks = (request.blocks if request.computed else local) + taken
        request.computed = before
        self.carry_out(self.play.alloc(request.name, request.blocks, external))
        if asynchronous and external:
            request.status = "remote"
            return True
        self.waiting.remove(request)
        self.running.append(request)
        request.status = "running"
        fresh[request.name] = None
        parts.append(self._part(request, count))
        self.pool.cache(request, min(request.computed + count, request.num_tokens))
        return True

    def _match(self, request: Request, local: int) -> tuple[int, bool] | None:
        grown: tuple[bytes, ...] = ()
        if len(request.hashes) > request.told_hashes:
            grown = request.hashes
            request.told_hashes = len(grown)
        commands = self.play.ask_all(request.name, request.num_tokens, local, grown)
        self.carry_out(commands)
        match = next(c for c in commands if hasattr(c, "num_tokens"))
        if match.num_tokens is None:
            return None
        assert 0 <= match.num_tokens <= max(0, request.num_tokens - 1 - local)
        return match.num_tokens, match.asynchronous

    def _loaded(self, request: Request) -> None:
        """An asynchronous load has ended: go on, from the first failed block if it failed."""
        request.status, request.recved = "waiting", False
        if request.load_failed and request.computed == 0:
            self.free(request)
        self.pool.cache(request, request.computed)
        request.load_failed = False

    def execute(self, *, fail_rank: int | None, early: bool) -> None:
        """Run the oldest step that has not run: loads that it waits for, then its tokens."""
        step = next(step for step in self.steps if not step.executed)
        step.executed = True
        if step.tell is not None:
            self._start_loads(step, fail_rank)
        for daemon in self.daemons:
            for job_id, (number, job) in list(daemon.saves.items()):
                if number == step.number and job.computed and early:
                    daemon.read_save(job_id)
        self._compute(step)
        for daemon in self.daemons:
            for job_id, (number, _) in list(daemon.saves.items()):
                if number == step.number and job_id not in daemon.read and early:
                    daemon.read_save(job_id)

    def _start_loads(self, step: Step, fail_rank: int | None) -> None:
        assert step.tell is not None
        for load in step.tell.loads:
            if not load.layerwise:
                ranks = set(range(len(self.daemons)))
                self.model_loads[load.job_id] = (load, ranks)
                continue
            for daemon in self.daemons:
                if load.job_id in daemon.loads:
                    failed = daemon.load(load.job_id, fail=fail_rank == daemon.rank)
                else:
                    failed = self._spoil(daemon, load.block_ids)
                step.invalid |= failed
        for job_id in step.tell.cancel:
            for daemon in self.daemons:
                if job_id in daemon.loads:
                    self.model_failed(job_id, daemon.rank, daemon.cancel(job_id))

    def _spoil(self, daemon: Daemon, block_ids: Iterable[int]) -> set[int]:
        """The daemon of a rank did not load: its blocks hold whatever they held."""
        for block in block_ids:
            daemon.memory[block] = [None] * SIZE
        return set(block_ids)

    def _compute(self, step: Step) -> None:
        """Write the tokens of a step: right only if all before them are right on every rank."""
        for part in step.parts:
            for position in range(part.start, part.start + part.count):
                self._write(part, position, None)
        left = list(step.parts)
        changed = True
        while changed:
            changed = False
            for part in list(left):
                eras = [self._era(part, position) for position in range(part.start)]
                if None not in eras:
                    era = min([self.era, *(era for era in eras if era is not None)])
                    for position in range(part.start, part.start + part.count):
                        self._write(part, position, (part.request.text, position, era))
                    left.remove(part)
                    changed = True

    def _write(self, part: Part, position: int, value: tuple[str, int, int] | None) -> None:
        for daemon in self.daemons:
            daemon.memory[part.blocks[position // SIZE]][position % SIZE] = value

    def _era(self, part: Part, position: int) -> int | None:
        """Era of the value at a position, None if it is wrong on any rank."""
        block, slot = part.blocks[position // SIZE], position % SIZE
        eras = []
        for daemon in self.daemons:
            value = daemon.memory[block][slot]
            if value is None or value[:2] != (part.request.text, position):
                return None
            eras.append(value[2])
        return min(eras)

    # Asynchronous loads, as the model sides see them.

    def run_load(self, rank: int, job_id: int, *, fail: bool) -> None:
        """A daemon carries out an asynchronous load after its step has begun."""
        self.model_failed(job_id, rank, self.daemons[rank].load(job_id, fail=fail))

    def model_failed(self, job_id: int, rank: int, failed: set[int]) -> None:
        if job_id not in self.model_loads:
            return
        load, ranks = self.model_loads[job_id]
        self.invalid |= failed
        ranks.discard(rank)
        if not ranks:
            del self.model_loads[job_id]
            self.recved.append(load.request_id)

    def lose_model_loads(self, rank: int) -> None:
        """A model side sees that its daemon is gone, or gives up waiting for it."""
        for job_id, (load, ranks) in list(self.model_loads.items()):
            if rank in ranks and job_id not in self.daemons[rank].loads:
                self.model_failed(job_id, rank, self._spoil(self.daemons[rank], load.block_ids))

    # The step's output.

    def finish_step(self) -> None:
        """``update_from_output`` of the oldest step."""
        step = self.steps[0]
        assert step.executed
        invalid = step.invalid | self.invalid
        self.invalid = set()
        failed = self._handle_invalid(invalid, {id(p.request): p.count for p in step.parts})
        self._outputs(step, failed)
        commands = self.play.done(step.number, *sorted(invalid))
        found = {(c.rank, c.body.step) for c in commands if _is_verdict(c)}
        assert len(found) == len(verdicts(commands))
        assert {number for _, number in found} <= {step.number} - self.judged
        if step.number in self.with_saves and all(d.alive and d.reachable for d in self.daemons):
            ranks = {rank for rank, _ in found}
            assert ranks <= set(range(len(self.daemons)))
        self.judged |= {number for _, number in found}
        self.carry_out(commands)
        for request_id in self.recved:
            self._finished_recving(self.requests[request_id])
        self.recved = []
        self.steps.pop(0)
        self.pool.give_back(step.frees)
        if self.policy == "fail":
            for request in failed:
                self.finish(request)

    def _outputs(self, step: Step, failed: list[Request]) -> None:
        for part in step.parts:
            request = part.request
            if request in failed or part.generation != request.generation or not part.samples:
                continue
            request.placeholders -= 1
            request.num_tokens += 1
            if request.num_tokens >= request.max_tokens:
                self.finish(request)

    def _finished_recving(self, request: Request) -> None:
        if request.status == "aborted":
            self.free(request)
            del self.requests[request.name]
        else:
            assert request.status == "remote"
            request.recved = True

    def _handle_invalid(self, invalid: set[int], scheduled: dict[int, int]) -> list[Request]:
        """As vLLM does: the first request with a bad block computes it again, others wait."""
        if not invalid:
            return []
        affected = []
        remote = [request for request in self.waiting if request.status == "remote"]
        for requests in (remote, self.running):
            marked: set[int] = set()
            for request in requests:
                if self._roll_back(request, invalid, marked, scheduled.get(id(request), 0)):
                    affected.append(request)
                    request.load_failed = request.status == "remote"
        if self.policy == "fail":
            for request in affected:
                self.pool.cached = {
                    h: b for h, b in self.pool.cached.items() if b not in request.blocks
                }
            return affected
        for request in affected:
            request.generation += 1
            request.placeholders = 0
        return []

    def _roll_back(self, request: Request, invalid: set[int], marked: set[int], count: int) -> bool:
        computed = request.computed - count
        is_affected = False
        mine = False
        for index, block in enumerate(request.blocks[: -(-computed // SIZE)]):
            if block not in invalid:
                continue
            is_affected = True
            if block in marked:
                continue
            marked.add(block)
            if not mine:
                mine = True
                request.computed = index * SIZE
        if is_affected and not mine:
            request.computed = min(computed, request.num_tokens - 1)
        return is_affected

    # The daemons.

    def answer_lookup(self, index: int, *, staged: bool) -> None:
        lookup = self.lookups.pop(index)
        wanted = lookup.groups[0].block_hashes
        count = 0
        while count < len(wanted) and all(wanted[count] in d.store for d in self.daemons):
            count += 1
        result = LookupResult(
            lookup_id=lookup.lookup_id,
            hits=(GroupHit(group=0, num_blocks=count),),
            staged=staged and count > 0,
        )
        self.carry_out(
            self.play.say(LookupAnswered(now_ns=self.play.now_ns, rank=0, result=result))
        )

    def deliver(self, rank: int) -> None:
        """A daemon's acknowledgements and ends reach the core."""
        daemon = self.daemons[rank]
        if not daemon.reachable:
            return
        for step in daemon.acks:
            self.play.say(PlanAcked(now_ns=self.play.now_ns, rank=rank, step=step))
        ends, daemon.outbox, daemon.acks = tuple(daemon.outbox), [], []
        self.carry_out(self.play.say(JobsReported(now_ns=self.play.now_ns, rank=rank, ends=ends)))

    def kill(self, rank: int) -> None:
        self.daemons[rank].die()
        if rank == 0:
            self.lookups.clear()
        self.lose_model_loads(rank)

    def restart(self, rank: int, *, notice: bool) -> None:
        """A new process serves the rank; the core may or may not have seen the old one die."""
        daemon = self.daemons[rank]
        if daemon.alive:
            self.kill(rank)
        if notice:
            self.carry_out(self.play.lost(rank, dead=True))
        self.lose_model_loads(rank)
        daemon.alive = daemon.reachable = True
        daemon.epoch += 100
        self.carry_out(self.play.daemon(rank, epoch=daemon.epoch))

    def freeze(self, rank: int) -> None:
        self.daemons[rank].reachable = False
        if rank == 0:
            self.lookups.clear()
        self.carry_out(self.play.lost(rank, dead=False))

    def thaw(self, rank: int) -> None:
        daemon = self.daemons[rank]
        daemon.reachable = True
        self.carry_out(self.play.daemon(rank, epoch=daemon.epoch))

    def reset(self, *, running: bool) -> None:
        """VLLM's reset with connector, which only works while no block is in use.

        If it preempts the running requests first, it raises where it does not work; else it
        resets the connector all the same and says False.
        """
        if running:
            for request in list(self.running):
                self.preempt(request)
        if len(self.pool.free) == POOL - 1:
            self.pool.cached.clear()
            self.era += 1
        elif running:
            return
        self.carry_out(self.play.say(ResetAsked(now_ns=self.play.now_ns)))

    # The end.

    def drain(self) -> None:
        """Let everything that is open end."""
        for rank, daemon in enumerate(self.daemons):
            if not daemon.alive:
                self.restart(rank, notice=True)
            elif not daemon.reachable:
                self.thaw(rank)
        for request in list(self.requests.values()):
            if request.status != "aborted":
                self.finish(request)
        for _ in range(4):
            while self.steps:
                if not self.steps[0].executed:
                    self.execute(fail_rank=None, early=True)
                self.finish_step()
            for rank, daemon in enumerate(self.daemons):
                for job_id in list(daemon.loads):
                    self.run_load(rank, job_id, fail=False)
                self.deliver(rank)
                self.lose_model_loads(rank)
            self.schedule(shrink=False)
        while self.steps:
            if not self.steps[0].executed:
                self.execute(fail_rank=None, early=True)
            self.finish_step()
        self.check()
        assert not self.play.core.has_pending, self.play.held
        assert self.play.core.num_held_blocks == 0
        assert not self.requests
        assert not self.model_loads
        assert sorted(self.pool.free) == list(range(1, POOL))
        assert dict(self.play.core.active) == {}

    def check(self) -> None:
        """No free block is in an open job."""
        held = {block for blocks in self.play.held.values() for block in blocks}
        assert not held.intersection(self.pool.free)


def _is_verdict(command: SchedCommand) -> bool:
    return isinstance(command, SendToDaemon) and isinstance(command.body, StepVerdict)
