"""A simple vLLM: blocks with references, a prefix cache, chunked prefill, preemption, async steps.

Right tokens come from right words in every layer of every rank.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvcommon.keys import fingerprint
from kvcommon.messages import RankIdentity
from kvsched.core.commands import AnswerMatch, FreeBlocks, HoldBlocks, SendToDaemon, TellModel
from kvsched.core.core import CoreConfig, SchedCore
from kvsched.core.events import (
    BlocksAllocated,
    MatchAsked,
    RanksKnown,
    RequestAdded,
    RequestFinished,
    SchedEvent,
    ScheduledRequest,
    StepFinished,
    StepScheduled,
    Ticked,
)
from kvsched.ranks import RankInfo, Ranks
from tests.pair.model import ENGINE, Model, namespace
from tests.pair.network import FakeContext
from tests.pair.records import CHUNK, POOL, SIZE, Part, Pool, Request, Step
from tests.pair.running import Running

if TYPE_CHECKING:
    from tests.pair.world import World

_TICK_NS = 250_000_000


class Engine(Running):
    """One engine process: scheduler and model sides of all ranks."""

    def __init__(
        self,
        world: "World",
        config: CoreConfig,
        core_type: Callable[[CoreConfig], SchedCore],
        depth: int,
    ) -> None:
        self.world = world
        self.pid, self.epoch = world.new_pid(), world.new_epoch()
        self.depth = depth
        self.core = core_type(config)
        self.pool = Pool()
        self.held: dict[int, tuple[int, ...]] = {}
        self.ended: set[int] = set()
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.steps: list[Step] = []
        self.preempted: list[str] = []
        self._number = self._count = 0
        self._answer: AnswerMatch | None = None
        self._tell: TellModel | None = None
        self._ticked_ns = 0
        self.models = [Model(world, r, self.pid, self.epoch) for r in range(world.num_ranks)]
        named = tuple(
            RankIdentity(rank=r, fingerprint=fingerprint(namespace(r)))
            for r in range(world.num_ranks)
        )
        self.handle(RanksKnown(now_ns=world.now_ns, ranks=named))
        infos = [
            RankInfo(
                rank=each.rank,
                endpoint=f"ipc://{each.rank}",
                device=f"cpu:{each.rank}",
                fingerprint=each.fingerprint,
                object_bytes=48,
                block_size=SIZE,
                num_blocks=POOL,
            )
            for each in named
        ]
        context: Any = FakeContext(world.network)
        watch: Any = world.watch
        self.ranks = Ranks(
            context,
            ENGINE,
            self.epoch,
            infos,
            emit=self.handle,
            open_jobs=self.core.open_jobs,
            heartbeat_ms=1000,
            on_welcome=lambda _: None,
            may_kill=world.may_kill,
            watch=watch,
            now_ns=lambda: world.now_ns,
        )

    def handle(self, event: SchedEvent, _cause: str = "") -> None:
        for command in self.core.handle(event):
            if isinstance(command, HoldBlocks):
                assert command.job_id not in self.ended
                for block in command.block_ids:
                    assert self.pool.refs[block] > 0, "rule 1: a free block is given to a job"
                    self.pool.refs[block] += 1
                self.held[command.job_id] = command.block_ids
            elif isinstance(command, FreeBlocks):
                assert command.job_id not in self.ended, "rule 2: a job ended twice"
                self.ended.add(command.job_id)
                self.pool.give_back(list(self.held.pop(command.job_id)))
            elif isinstance(command, SendToDaemon):
                self.ranks.send(command.rank, command.body, "")
            elif isinstance(command, AnswerMatch):
                self._answer = command
            elif isinstance(command, TellModel):
                self._tell = command
            else:
                self.ranks.fence(command.rank)

    def poll(self) -> None:
        """The shell's ``_poll``."""
        self.ranks.poll()
        if self.world.now_ns - self._ticked_ns > _TICK_NS:
            self._ticked_ns = self.world.now_ns
            silent = self.ranks.silences()
            self.handle(Ticked(now_ns=self.world.now_ns, silent_ms=silent))

    # Requests come and go.

    def add(self, text: str, length: int, num_new: int) -> None:
        self._count += 1
        request = Request(f"r{self._count}", text, length, num_new)
        self.requests[request.name] = request
        self.waiting.append(request)
        request.told = len(request.hashes)
        self.handle(
            RequestAdded(
                now_ns=self.world.now_ns,
                request_id=request.name,
                num_tokens=length,
                block_hashes=request.hashes,
            )
        )

    def finish(self, request: Request) -> None:
        self.handle(RequestFinished(now_ns=self.world.now_ns, request_id=request.name))
        request.generation += 1
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        if request.status == "remote" and len(request.recved) < len(self.models):
            request.status = "aborted"
            return
        self._free(request)
        request.status = "finished"
        del self.requests[request.name]

    def _free(self, request: Request) -> None:
        """Later, if a step in flight may still write there."""
        if self.steps:
            self.steps[-1].frees += request.blocks
        else:
            self.pool.give_back(request.blocks)
        request.blocks = []

    def preempt(self, request: Request) -> None:
        self._free(request)
        request.computed = request.placeholders = 0
        request.generation += 1
        request.status = "waiting"
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.preempted.append(request.name)

    # A step is decided.

    def schedule(self) -> None:
        assert len(self.steps) < self.depth
        self.poll()
        self._number += 1
        parts: list[Part] = []
        before = len(self.preempted)
        for request in list(self.running):
            if request in self.running:
                self._schedule_running(request, parts)
        if len(self.preempted) == before:
            for request in sorted(self.waiting, key=lambda one: not one.blocks):
                if not self._admit(request, parts):
                    break
        parts = [part for part in parts if part.request.status == "running"]
        event = StepScheduled(
            step=self._number,
            now_ns=self.world.now_ns,
            requests=tuple(self._told(part) for part in parts if self._is_told(part)),
            preempted=tuple(self.preempted),
        )
        self.preempted = []
        self._tell = None
        if event.requests or event.preempted or self.core.wants_step:
            self.handle(event)
        self.steps.append(Step(self._number, parts, self._tell))
        for part in parts:
            part.request.computed = part.end

    def _is_told(self, part: Part) -> bool:
        return part.request.name in self.core.active

    def _told(self, part: Part) -> ScheduledRequest:
        request = part.request
        told, request.told = request.told, len(request.hashes)
        return ScheduledRequest(
            request_id=request.name,
            num_computed_tokens=part.start,
            num_scheduled_tokens=part.end - part.start,
            replace=part.replace,
            block_ids=tuple(part.blocks if part.replace else part.new_blocks),
            new_block_hashes=request.hashes[told:],
        )

    def _part(self, request: Request, count: int, new_blocks: list[int], *, replace: bool) -> Part:
        end = request.computed + count
        samples = end == request.num_tokens + request.placeholders
        request.placeholders += samples
        for block_hash, block in zip(request.hashes[: end // SIZE], request.blocks, strict=False):
            self.pool.cached.setdefault(block_hash, block)
        return Part(
            request,
            request.blocks,
            request.computed,
            end,
            samples,
            request.generation,
            replace,
            new_blocks,
        )

    def _schedule_running(self, request: Request, parts: list[Part]) -> None:
        total = request.num_tokens + request.placeholders
        count = min(CHUNK, total - request.computed)
        if count <= 0 or request.placeholders >= request.num_new:
            return
        need = math.ceil((request.computed + count) / SIZE) - len(request.blocks)
        while (taken := self.pool.take(max(0, need))) is None:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return
        request.blocks = request.blocks + taken
        parts.append(self._part(request, count, taken, replace=False))

    def _admit(self, request: Request, parts: list[Part]) -> bool:
        """Return False to stop looking at the queue."""
        if request.status == "remote":
            if len(request.recved) < len(self.models):
                return True
            request.status, request.recved = "waiting", set()
            if request.computed == 0:
                self._free(request)
        local: list[int] = []
        external, asynchronous = 0, False
        if request.computed == 0:
            local = self._local(request)
            answer = self._match(request, len(local) * SIZE)
            if answer.num_tokens is None:
                return True
            external, asynchronous = (
                answer.num_tokens,
                answer.asynchronous and answer.num_tokens > 0,
            )
            self.pool.touch(local)
            before, have = len(local) * SIZE + external, len(local)
        else:
            before, have = request.computed, len(request.blocks)
        count = 0 if asynchronous else min(CHUNK, request.num_tokens - before)
        taken = None
        if request.computed or self._fits(request, len(local)):
            taken = self.pool.take(max(0, math.ceil((before + count) / SIZE) - have))
        if taken is None:
            self.pool.give_back(local)
            return False
        request.blocks = (request.blocks if request.computed else local) + taken
        request.computed = before
        self.handle(
            BlocksAllocated(
                now_ns=self.world.now_ns,
                request_id=request.name,
                block_ids=tuple(request.blocks),
                num_external_tokens=external,
            )
        )
        if asynchronous:
            request.status = "remote"
            return True
        self.waiting.remove(request)
        self.running.append(request)
        request.status = "running"
        parts.append(self._part(request, count, taken, replace=True))
        return True

    def _fits(self, request: Request, num_local: int) -> bool:
        """It does not take the blocks that loading requests need to go on (``reserved_blocks``)."""
        others = [r for r in self.waiting if r.blocks and r is not request]
        needs = [r.num_tokens + r.num_new - len(r.blocks) * SIZE for r in others]
        needs.append(request.num_tokens + request.num_new - num_local * SIZE)
        return sum(math.ceil(max(0, need) / SIZE) for need in needs) <= len(self.pool.free)

    def _local(self, request: Request) -> list[int]:
        found = []
        for block_hash in request.hashes[: (request.num_tokens - 1) // SIZE]:
            if block_hash not in self.pool.cached:
                break
            found.append(self.pool.cached[block_hash])
        return found

    def _match(self, request: Request, local: int) -> AnswerMatch:
        grown = len(request.hashes) > request.told
        request.told = len(request.hashes)
        self.handle(
            MatchAsked(
                now_ns=self.world.now_ns,
                request_id=request.name,
                num_tokens=request.num_tokens,
                num_local_tokens=local,
                block_hashes=request.hashes if grown else (),
            )
        )
        assert self._answer is not None
        return self._answer

    # Its output comes back.

    def finish_step(self) -> None:
        step = self.steps[0]
        assert step.is_over
        self._roll_back(step.invalid)
        done = [self._sample(part) for part in step.parts]
        self.handle(
            StepFinished(
                now_ns=self.world.now_ns,
                step=step.number,
                invalid_block_ids=tuple(sorted(step.invalid)),
            )
        )
        for rank, name in step.recved:
            request = self.requests[name]
            assert request.status in {"remote", "aborted"}, "rule 2: an unexpected end of a load"
            assert rank not in request.recved, "rule 2: a load ended twice"
            request.recved.add(rank)
            if request.status == "aborted" and len(request.recved) == len(self.models):
                self._free(request)
                del self.requests[name]
        self.steps.pop(0)
        self.pool.give_back(step.frees)
        for last in done:
            if last is not None and last.status == "running":
                self.finish(last)

    def close(self) -> None:
        """The process is killed."""
        self.world.dead.add(self.pid)
        self.ranks.close()
        for model in self.models:
            model.close()
