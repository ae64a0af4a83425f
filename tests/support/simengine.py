"""The scheduler of the small vLLM: it plans steps and tells the core as the shell would."""

from collections.abc import Sequence

from kvcommon.messages import Lookup, ResetStore, StepPlan, StepVerdict
from kvsched.core.commands import (
    FreeBlocks,
    HoldBlocks,
    ModelLoad,
    SchedCommand,
    SendToDaemon,
    TellModel,
)
from kvsched.core.events import RequestAdded, ScheduledRequest
from tests.support.schedplay import Play, answer, hashes
from tests.support.simdaemon import Daemon
from tests.support.simpool import (
    BUDGET,
    CHUNK,
    MAX_TOKENS,
    POOL,
    SIZE,
    Part,
    Pool,
    Request,
    Step,
    right,
)

#: Request → blocks that a step appends to its table; None: the whole table is told.
Fresh = dict[str, list[int] | None]


class Engine:
    """VLLM's scheduler with the connector's shell, and a daemon per rank."""

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
        fresh: Fresh = {}
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

    def _told(self, parts: list[Part], fresh: Fresh) -> list[ScheduledRequest]:
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

    def _schedule_running(self, request: Request, parts: list[Part], fresh: Fresh) -> None:
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
        fresh: Fresh,
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
        match = answer(commands)
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
