"""A small world around the daemon's core: peers, transfer threads, a store.

It knows nothing of how the core works. It delivers messages in the order in which each socket
would, answers operations in any order, and checks every command by ``worker_rules``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Union

import msgspec

from kvcommon.layout import CacheLayout
from kvcommon.messages import (
    Attach,
    Hello,
    LayersComputed,
    LoadJob,
    Lookup,
    RankIdentity,
    SaveJob,
    StepBegun,
    StepPlan,
    StepVerdict,
)
from kvworker.core.commands import (
    ClosePuts,
    LoadLayers,
    OpenGets,
    OpenPuts,
    WorkerCommand,
    WriteLayers,
)
from kvworker.core.core import CoreConfig, WorkerCore
from kvworker.core.events import ModelSaid, PeerLost, SchedulerSaid, Ticked, WorkerEvent
from kvworker.outcome import Outcome
from tests.support.playbook import (
    LAYER_BYTES,
    MARK,
    NUM_LAYERS,
    answer_to,
    attach,
    group_layout,
)
from tests.support.worker_records import Planned, Rank
from tests.support.worker_rules import Rules

NUM_BLOCKS = 1 << 16
_LAYOUT = CacheLayout(
    groups=(msgspec.structs.replace(group_layout(), num_blocks=NUM_BLOCKS),),
    storage_bytes=(4096,),
)


class World(Rules):
    """Everything outside of the core."""

    def __init__(
        self, core_type: Callable[[CoreConfig], WorkerCore] = WorkerCore, *, validate: bool = True
    ) -> None:
        super().__init__()
        self.config = CoreConfig(
            device="cpu:0",
            store="memory",
            validate=validate,
            store_down_after=2,
            verdict_grace_ms=50,
        )
        self.core = core_type(self.config)
        self.log: list[tuple[WorkerEvent, list[WorkerCommand]]] = []
        self.now_ns = 0
        self._next = 0

    def number(self) -> int:
        """A number that nothing had before."""
        self._next += 1
        return self._next

    # --- events

    def handle(self, event: WorkerEvent) -> None:
        self.now_ns += 1
        commands = self.core.handle(event)
        self.log.append((event, commands))
        for command in commands:
            self.check(command)

    def tick(self, ms: int) -> None:
        self.now_ns += ms * 1_000_000
        self.handle(Ticked(now_ns=self.now_ns))

    def attach(self, rank: Rank) -> None:
        """A new model process attaches; if there was one, it is gone."""
        rank.model_epoch, rank.attached = self.number(), False
        rank.incarnation = rank.model_epoch
        self._model_is_new(rank)
        one = attach()
        body = Attach(
            pid=rank.model_epoch,
            device="cpu:0",
            storages=one.storages,
            layout=_LAYOUT,
            page=one.page,
            namespace=one.namespace,
        )
        self._from_model(rank, body)

    def lose_model(self, rank: Rank) -> None:
        epoch, rank.model_epoch, rank.attached = rank.model_epoch, 0, False
        self._model_is_new(rank)
        self.handle(
            PeerLost(now_ns=self.now_ns, engine=rank.name, role="model", epoch=epoch, reason="x")
        )

    def _model_is_new(self, rank: Rank) -> None:
        rank.from_model.clear()
        # It runs every step anew, so that whatever is planned for it has its turn.
        rank.begun = rank.running = 0
        rank.computed = {}

    def hello(self, rank: Rank, *, again: bool) -> None:
        """A scheduler side opens its conversation, or a new one does."""
        if not again:
            rank.epoch = self.number()
            rank.jobs, rank.lookups = {}, set()
            rank.scheduled = rank.running = rank.finished = rank.begun = 0
            rank.computed, rank.judged, rank.page = {}, set(), {}
            rank.from_model.clear()
        rank.from_scheduler.clear()
        # What was not delivered never will be: from now on it is up to the daemon.
        for planned in rank.open_jobs():
            planned.delivered = True
        open_jobs = tuple(planned.job.job_id for planned in rank.open_jobs())
        ranks = (RankIdentity(rank=0, fingerprint=MARK),)
        self._from_scheduler(rank, Hello(pid=1, ranks=ranks, open_jobs=open_jobs))

    def lose_scheduler(self, rank: Rank) -> None:
        self.handle(
            PeerLost(
                now_ns=self.now_ns,
                engine=rank.name,
                role="scheduler",
                epoch=rank.epoch,
                reason="x",
            )
        )

    def schedule(self, rank: Rank, jobs: Sequence[Union[LoadJob, SaveJob]]) -> None:
        """The scheduler side decides a step; its plan is on its way."""
        rank.scheduled += 1
        for job in jobs:
            rank.jobs[job.job_id] = Planned(job, rank.scheduled, rank.epoch)
        loads = tuple(job for job in jobs if isinstance(job, LoadJob))
        saves = tuple(job for job in jobs if isinstance(job, SaveJob))
        rank.from_scheduler.append(StepPlan(step=rank.scheduled, loads=loads, saves=saves))

    def run_step(self, rank: Rank, num_layers: int = NUM_LAYERS) -> None:
        """The model process runs the next scheduled step; what it says is on its way."""
        rank.running += 1
        rank.from_model.append(StepBegun(step=rank.running))
        for computed in range(1, num_layers + 1):
            rank.from_model.append(LayersComputed(step=rank.running, num_layers=computed))

    def finish_step(self, rank: Rank, tainted: Sequence[int]) -> None:
        """The output of the next step came back; the verdict is on its way."""
        rank.finished += 1
        rank.from_scheduler.append(StepVerdict(step=rank.finished, tainted=tuple(tainted)))

    def deliver_model(self, rank: Rank) -> None:
        body = rank.from_model.popleft()
        if isinstance(body, StepBegun):
            rank.begun = body.step
        elif isinstance(body, LayersComputed):
            rank.computed[body.step] = body.num_layers
        self._from_model(rank, body)

    def deliver_scheduler(self, rank: Rank) -> None:
        body = rank.from_scheduler.popleft()
        if isinstance(body, StepPlan):
            job_ids = [load.job_id for load in body.loads] + [save.job_id for save in body.saves]
            for job_id in job_ids:
                planned = rank.jobs[job_id]
                planned.delivered = True
                planned.incarnation = rank.incarnation if rank.attached else 0
        elif isinstance(body, Lookup):
            rank.lookups.add(body.lookup_id)
        elif isinstance(body, StepVerdict):
            rank.judged.add(body.step)
            for job_id in body.tainted:
                rank.jobs[job_id].tainted = True
        self._from_scheduler(rank, body)

    def _from_model(self, rank: Rank, body: Any) -> None:
        self.handle(
            ModelSaid(now_ns=self.now_ns, engine=rank.name, epoch=rank.model_epoch, body=body)
        )

    def _from_scheduler(self, rank: Rank, body: Any) -> None:
        self.handle(
            SchedulerSaid(now_ns=self.now_ns, engine=rank.name, epoch=rank.epoch, body=body)
        )

    def answer(
        self, op: int, outcomes: Sequence[Outcome], *, short: int = 0, **fields: Any
    ) -> None:
        """An operation ends; ``outcomes`` are cut or filled up with OK.

        Of a write, ``short`` says how many bytes too few its first key reports.
        """
        command = self.pending.pop(op)
        keys = command.end if isinstance(command, ClosePuts) else getattr(command, "keys", ())
        each = (*outcomes, *(Outcome.OK,) * len(keys))[: len(keys)]
        good = [name for name, outcome in zip(keys, each, strict=True) if outcome is Outcome.OK]
        if isinstance(command, OpenPuts):
            if not fields.get("whole"):
                self.puts.update(dict.fromkeys(good, 0))
        elif isinstance(command, WriteLayers):
            due = (command.end_layer - command.first_layer) * LAYER_BYTES
            num_bytes = [due * (outcome is Outcome.OK) for outcome in each]
            num_bytes[0] = max(0, num_bytes[0] - short)
            fields["num_bytes"] = tuple(num_bytes)
            good = [name for name, got in zip(keys, num_bytes, strict=True) if got == due]
            if command.whole:
                self.published.update(good)
            else:
                self.puts.update(dict.fromkeys(good, command.end_layer))
        elif isinstance(command, ClosePuts):
            for name in (*command.end, *command.revoke):
                del self.puts[name]
            self.published.update(good)
        elif isinstance(command, OpenGets):
            self.gets.update(good)
        elif isinstance(command, LoadLayers):
            self._loaded(command, each)
        self.handle(answer_to(command, each, self.now_ns, **fields))

    def _loaded(self, command: LoadLayers, outcomes: Sequence[Outcome]) -> None:
        for block_id, outcome in zip(command.block_ids, outcomes, strict=True):
            if outcome is Outcome.OK:
                self.loaded.add((command.engine, block_id))
        rank = self.ranks[command.engine]
        if command.publish and Outcome.CANCELLED not in outcomes:
            failed = command.tainted or any(outcome is not Outcome.OK for outcome in outcomes)
            rank.page[rank.incarnation, command.step] = failed

    # --- the end of the story

    def settle(self) -> None:
        """Let everybody do what is left to do; then nothing may be left."""
        for rank in self.ranks.values():
            while rank.from_scheduler:
                self.deliver_scheduler(rank)
            while rank.attached and rank.running < rank.scheduled:
                self.run_step(rank)
            while rank.from_model:
                self.deliver_model(rank)
            while rank.epoch and rank.finished < rank.scheduled:
                self.finish_step(rank, ())
                self.deliver_scheduler(rank)
        for _ in range(4):
            while self.pending:
                self.answer(next(iter(self.pending)), ())
            self.tick(2000)
        for rank in self.ranks.values():
            left = [planned for planned in rank.open_jobs() if planned.delivered]
            assert not left, f"jobs never ended: {left}"
            assert not rank.lookups, "lookups never answered"
            self.check_pages(rank)
        assert not self.puts, "put sessions are left open"
        assert not +self.gets, "get sessions are left open"
        metrics = self.core.status().metrics
        for gauge in ("jobs", "lookups", "operations", "puts", "gets"):
            assert metrics[f"kvferry_{gauge}_open"] == 0, gauge
