"""The daemon's decisions: ``handle(event) -> commands``. Pure, synchronous, deterministic.

The parts, each in its own module: ``attachments`` (memory), ``schedulers`` (conversations, resets),
``plans`` (what is wanted), ``saves`` and ``loads`` (batches), ``lookups``, ``breaker`` (the store),
``jobs`` (the one book of jobs). ``states`` has every legal move as a table.
"""

from kvcommon import reasons
from kvcommon.messages import (
    Attach,
    CancelJobs,
    Detach,
    Heartbeat,
    Hello,
    LayersComputed,
    Lookup,
    Refused,
    ReleaseLookup,
    ResetStore,
    StepBegun,
    StepPlan,
    StepVerdict,
)
from kvworker.core.commands import WorkerCommand
from kvworker.core.config import CoreConfig
from kvworker.core.engines import Engine
from kvworker.core.events import ModelSaid, PeerLost, SchedulerSaid, Ticked, WorkerEvent
from kvworker.core.invariants import check
from kvworker.core.parts import make_parts
from kvworker.core.status import CoreStatus, show

__all__ = ["CoreConfig", "WorkerCore"]


class WorkerCore:
    """One per daemon. Owned by one thread; only ``handle`` changes it."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self._parts = make_parts(config)

    def handle(self, event: WorkerEvent) -> list[WorkerCommand]:
        """Take in one event; return what is to be done, in order.

        Raises:
            LocalProtocolError: the event is illegal (it answers no operation in flight, or has
                the wrong number of outcomes): a bug of the shell. Nothing has changed.
        """
        kernel = self._parts.kernel
        kernel.now_ns = event.now_ns
        was_down = self._parts.breaker.down
        if isinstance(event, Ticked):
            self._parts.breaker.tick()
            self._parts.saves.tick()
        elif isinstance(event, ModelSaid):
            self._model_said(event)
        elif isinstance(event, SchedulerSaid):
            self._scheduler_said(event)
        elif isinstance(event, PeerLost):
            self._peer_lost(event)
        else:
            kernel.answer(event)
        if self._parts.breaker.down and not was_down:
            self._store_went_down()
        for engine in self._parts.engines:
            self._parts.schedulers.advance_reset(engine)
        self._parts.book.flush()
        commands, kernel.out = kernel.out, []
        if self.config.validate:
            self.validate()
        return commands

    def status(self) -> CoreStatus:
        """Return what a person wants to see, as of the last event."""
        return show(self._parts)

    def validate(self) -> None:
        """Assert every invariant.

        Raises:
            AssertionError: one is broken: a bug of the core.
        """
        check(self._parts)

    def _model_said(self, event: ModelSaid) -> None:
        body = event.body
        if isinstance(body, Attach):
            self._parts.attachments.attach(
                self._parts.engines.meet(event.engine), event.epoch, body
            )
            return
        engine = self._parts.engines.get(event.engine)
        if engine is None or not engine.model_epoch:
            if not isinstance(body, Detach):
                self._parts.kernel.to_model(event.engine, _unknown("Attach"))
            return
        if engine.model_epoch != event.epoch:
            self._parts.kernel.count("stale_messages", role="model")
            return
        if isinstance(body, Detach):
            self._parts.attachments.lost(engine, reasons.CANCELLED)
        elif isinstance(body, StepBegun):
            engine.progress.event = body.event
            engine.note_begun(body.step)
            self._parts.loads.model_moved(engine)
            self._parts.saves.model_moved(engine)
        elif isinstance(body, LayersComputed):
            engine.progress.event = body.event
            engine.progress.note_computed(body.step, body.num_layers)
            self._parts.saves.model_moved(engine)
        elif isinstance(body, CancelJobs):
            self._cancel(engine, body)
        else:
            assert isinstance(body, Heartbeat)

    def _scheduler_said(self, event: SchedulerSaid) -> None:
        body = event.body
        if isinstance(body, Hello):
            self._parts.schedulers.hello(self._parts.engines.meet(event.engine), event.epoch, body)
            return
        engine = self._parts.engines.get(event.engine)
        if engine is None or not engine.scheduler_epoch:
            self._parts.kernel.to_scheduler(event.engine, _unknown("Hello"))
            return
        if engine.scheduler_epoch != event.epoch:
            self._parts.kernel.count("stale_messages", role="scheduler")
            return
        if isinstance(body, Lookup):
            self._parts.lookups.ask(engine, body)
        elif isinstance(body, StepPlan):
            self._parts.plans.take(engine, body)
        elif isinstance(body, StepVerdict):
            engine.progress.returned = max(engine.progress.returned, body.step)
            self._parts.loads.model_moved(engine)
            self._parts.saves.verdict(engine, body.step, body.tainted)
        elif isinstance(body, ReleaseLookup):
            self._parts.lookups.release(body.lookup_id)
        elif isinstance(body, ResetStore):
            self._parts.schedulers.reset(engine)
        else:
            assert isinstance(body, Heartbeat)

    def _peer_lost(self, event: PeerLost) -> None:
        engine = self._parts.engines.get(event.engine)
        if engine is None:
            return
        if event.role == "scheduler" and event.epoch == engine.scheduler_epoch:
            self._parts.kernel.count("peers_lost", role=event.role)
            self._parts.schedulers.lost(engine)
        elif event.role == "model" and event.epoch == engine.model_epoch:
            self._parts.kernel.count("peers_lost", role=event.role)
            self._parts.attachments.lost(engine, reasons.ENGINE_LOST)

    def _cancel(self, engine: Engine, body: CancelJobs) -> None:
        """Give up single jobs; those that ended already stay as they ended."""
        wanted = frozenset(body.job_ids)
        for load_batch in self._parts.loads.of(engine):
            jobs = [job for job in load_batch.jobs if job.key.job_id in wanted]
            if jobs:
                self._parts.loads.give_up(load_batch, jobs, reasons.CANCELLED)
        for save_batch in self._parts.saves.of(engine):
            jobs = [job for job in save_batch.jobs if job.key.job_id in wanted]
            if jobs:
                self._parts.saves.give_up(save_batch, jobs, reasons.CANCELLED)

    def _store_went_down(self) -> None:
        """What waits for something fails now, rather than after it."""
        for load_batch in tuple(self._parts.loads.batches):
            self._parts.loads.advance(load_batch)
        for save_batch in tuple(self._parts.saves.batches):
            self._parts.saves.advance(save_batch)


def _unknown(opening: str) -> Refused:
    """Tell a side that this daemon does not know it (any more)."""
    return Refused(
        reason="this daemon has no conversation with you",
        remedy=f"say {opening} first",
        resync=True,
    )
