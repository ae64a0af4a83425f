"""A small vLLM and small daemons around the scheduler side's core, to find what playbooks do not.

The vLLM has a block pool with reference counts and a prefix cache that hands out blocks before
they are computed, chunked prefill, preemption, async scheduling (two steps in flight, with
deferred frees), synchronous and asynchronous loads, and both failure policies. Every block holds
what was really written to it on each rank, so that a wrong byte under a valid key is seen when it
is published.
"""

from collections.abc import Iterable

from kvcommon.messages import GroupHit, LookupResult, StepVerdict
from kvsched.core.commands import SendToDaemon
from kvsched.core.events import JobsReported, LookupAnswered, PlanAcked, ResetAsked
from tests.support.schedplay import verdicts
from tests.support.simdaemon import Daemon
from tests.support.simengine import Engine
from tests.support.simpool import POOL, SIZE, Part, Request, Step


class Sim(Engine):
    """The engine's worker, the output of its steps, and what happens to daemons."""

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
        found = {
            (command.rank, command.body.step)
            for command in commands
            if isinstance(command, SendToDaemon) and isinstance(command.body, StepVerdict)
        }
        assert len(found) == len(verdicts(commands))
        assert {number for _, number in found} <= {step.number} - self.judged
        if step.number in self.with_saves:
            told = {rank for rank, _ in found}
            assert told >= self._heard(step.number), "a daemon with saves got no verdict"
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

    def _heard(self, number: int) -> set[int]:
        """Ranks whose daemons still have saves of a step open."""
        return {
            daemon.rank
            for daemon in self.daemons
            if daemon.alive
            and daemon.reachable
            and any(step == number for step, _ in daemon.saves.values())
        }

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
        self._revive()
        for request in list(self.requests.values()):
            if request.status != "aborted":
                self.finish(request)
        for _ in range(4):
            self._run_all()
            for rank, daemon in enumerate(self.daemons):
                for job_id in list(daemon.loads):
                    self.run_load(rank, job_id, fail=False)
                self.deliver(rank)
                self.lose_model_loads(rank)
            self.schedule(shrink=False)
        self._run_all()
        self.check()
        assert not self.play.core.has_pending, self.play.held
        assert self.play.core.num_held_blocks == 0
        assert not self.requests
        assert not self.model_loads
        assert sorted(self.pool.free) == list(range(1, POOL))
        assert dict(self.play.core.active) == {}

    def _revive(self) -> None:
        for rank, daemon in enumerate(self.daemons):
            if not daemon.alive:
                self.restart(rank, notice=True)
            elif not daemon.reachable:
                self.thaw(rank)

    def _run_all(self) -> None:
        while self.steps:
            if not self.steps[0].executed:
                self.execute(fail_rank=None, early=True)
            self.finish_step()

    def check(self) -> None:
        """No free block is in an open job."""
        held = {block for blocks in self.play.held.values() for block in blocks}
        assert not held.intersection(self.pool.free)
