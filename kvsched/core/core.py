"""The scheduler side's core: what vLLM and the daemons say goes in, what to do comes out.

Pure and synchronous: no clock, socket, thread or random source (rule 10). ``SchedCore.handle`` is
the only door. It may raise ``LocalProtocolError`` if vLLM breaks its own contract; whatever a
daemon does, it never raises.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvcommon.messages import ResetStore
from kvsched.core.commands import FenceDaemon, SchedCommand
from kvsched.core.config import CoreConfig
from kvsched.core.events import (
    BlocksAllocated,
    DaemonLost,
    DaemonReady,
    FenceFailed,
    JobsReported,
    LookupAnswered,
    MatchAsked,
    PlanAcked,
    RanksKnown,
    RequestAdded,
    RequestFinished,
    ResetAsked,
    SchedEvent,
    StepFinished,
    StepScheduled,
    StoreChanged,
    Ticked,
)
from kvsched.core.jobs import JobKind
from kvsched.core.matching import Matcher
from kvsched.core.ranks import Rank
from kvsched.core.reports import Reporter
from kvsched.core.requests import SaveBar
from kvsched.core.scheduling import Planner
from kvsched.core.state import CoreState
from kvsched.core.verdicts import Judge

__all__ = ["CoreConfig", "SchedCore"]


class SchedCore:
    """Decides what is looked up, loaded, saved and published."""

    def __init__(self, config: CoreConfig) -> None:
        self._state = CoreState(config)
        self._matcher = Matcher(self._state)
        self._reporter = Reporter(self._state)
        self._planner = Planner(self._state, self._matcher, self._reporter)
        self._judge = Judge(self._state)
        self._handlers: dict[type[SchedEvent], Callable[[Any], list[SchedCommand]]] = {
            Ticked: self._ticked,
            RanksKnown: self._ranks_known,
            DaemonReady: self._daemon_ready,
            DaemonLost: self._daemon_lost,
            FenceFailed: self._fence_failed,
            StoreChanged: self._store_changed,
            RequestAdded: self._request_added,
            MatchAsked: self._matcher.asked,
            BlocksAllocated: self._matcher.allocated,
            StepScheduled: self._planner.scheduled,
            StepFinished: self._judge.finished,
            RequestFinished: self._request_finished,
            LookupAnswered: self._matcher.answered,
            PlanAcked: self._plan_acked,
            JobsReported: self._jobs_reported,
            ResetAsked: self._reset_asked,
        }

    def handle(self, event: SchedEvent) -> list[SchedCommand]:
        """Take in one event; return what is to be done, in order.

        Raises:
            LocalProtocolError: vLLM did what its interface excludes; nothing has changed.
        """
        commands = self._handlers[type(event)](event)
        if self._state.config.validate:
            self.validate()
        return commands

    @property
    def active(self) -> Mapping[str, None]:
        """Requests of which ``StepScheduled`` must tell, if they are scheduled; all others can be
        left out. A live view: do not keep it over ``handle``."""
        return self._state.active

    @property
    def wants_step(self) -> bool:
        """The next ``StepScheduled`` is needed even if it tells of no request."""
        return bool(self._state.pending or self._state.cancel)

    @property
    def has_pending(self) -> bool:
        """Jobs are open: blocks are referenced, and vLLM must keep stepping.

        Not for jobs that only daemons in quarantine could end: that may take for ever.
        """
        if self.wants_step:
            return True
        silent = {rank.rank for rank in self._state.ranks.all() if rank.quarantined}
        ledger = self._state.ledger
        if not silent:
            return len(ledger) > 0
        return any(not silent.issuperset(job.waiting) for job in ledger)

    def only_waits(self, request_id: str, num_tokens: int, now_ns: int) -> bool:
        """Asked for this request's hit now, the answer were "ask again", and nothing changed."""
        return self._matcher.only_waits(request_id, num_tokens, now_ns)

    @property
    def owing_reset(self) -> tuple[int, ...]:
        """Ranks whose daemons have not been told of a reset; they are before they serve again."""
        return tuple(rank.rank for rank in self._state.ranks.all() if rank.owes_reset)

    def is_loading(self, rank: int) -> bool:
        """The daemon of a rank has loads open, so that it may write blocks."""
        return any(not job.is_save and rank in job.waiting for job in self._state.ledger)

    @property
    def num_held_blocks(self) -> int:
        """References that open jobs hold in vLLM's block pool."""
        return self._state.ledger.num_held_blocks

    @property
    def num_quarantined_blocks(self) -> int:
        """References that stay because a silent daemon may still touch the blocks."""
        silent = {rank.rank for rank in self._state.ranks.all() if rank.quarantined}
        if not silent:
            return 0
        jobs = (job for job in self._state.ledger if not silent.isdisjoint(job.waiting))
        return sum(len(job.block_ids) for job in jobs)

    @property
    def serving(self) -> bool:
        """Every rank's daemon is there and attached, and the store is up."""
        return self._state.ranks.serving and self._state.ranks.store_up

    @property
    def counters(self) -> Mapping[str, int]:
        """Totals since the start, by name."""
        return self._state.counters

    def open_jobs(self, rank: int) -> tuple[int, ...]:
        """Return the jobs that a rank has not ended: ``Hello.open_jobs``."""
        return self._state.ledger.open_on(rank)

    def validate(self) -> None:
        """Assert every invariant of the core's state. Slow."""
        state = self._state
        state.ledger.validate(state.ranks.named)
        self._matcher.validate()
        for request_id, record in state.requests.items():
            assert record.request_id == request_id
            assert (request_id in state.active) == state.wants_steps(record), record
            assert record.next_save <= len(record.hashes), record
            if record.async_job:
                job = state.ledger.get(record.async_job)
                assert job is not None, record
                assert job.kind is JobKind.ASYNC_LOAD, job
        assert state.requests.keys() >= state.active.keys()
        for load in state.pending.values():
            known = state.find(load.request_id, load.serial) is not None
            assert known != load.cancelled, load
        for step in state.steps:
            assert {note.job_id for note in step.saves}.issuperset(step.tainted), step
        for job in state.ledger:
            if job.is_save:
                record_of_step = state.steps.get(job.step)
                assert record_of_step is not None, job
                assert any(note.job_id == job.job_id for note in record_of_step.saves), job

    def _ticked(self, event: Ticked) -> list[SchedCommand]:
        overdue_before_ns = event.now_ns - self._state.config.ack_timeout_ns
        self._state.counters["acks_late"] += self._state.ranks.find_late(overdue_before_ns)
        silent = dict(event.silent_ms)
        commands: list[SchedCommand] = []
        for rank in self._state.ranks.all():
            rank.silent_ms = silent.get(rank.rank, 0)
            if not rank.silent_ms:
                rank.heard()
            elif self._is_to_be_fenced(rank):
                rank.fenced = True
                self._state.counters["daemons_fenced"] += 1
                commands.append(FenceDaemon(rank=rank.rank))
        return commands

    def _is_to_be_fenced(self, rank: Rank) -> bool:
        """Whether it is frozen and may touch blocks when it goes on."""
        if rank.fenced or rank.quarantined or not rank.epoch:
            return False
        if rank.silent_ms < self._state.config.fence_timeout_ms:
            return False
        return bool(self._state.ledger.open_on(rank.rank))

    def _fence_failed(self, event: FenceFailed) -> list[SchedCommand]:
        rank = self._state.ranks.get(event.rank)
        if rank.fenced:
            rank.fenced, rank.quarantined = False, True
            self._state.counters["fences_failed"] += 1
        return []

    def _ranks_known(self, event: RanksKnown) -> list[SchedCommand]:
        ranks = self._state.ranks
        named = tuple(sorted(identity.rank for identity in event.ranks))
        commands: list[SchedCommand] = []
        for rank in ranks.named:
            if rank not in named:
                commands += self._reporter.rank_gone(rank)
        ranks.named = named
        return commands

    def _daemon_ready(self, event: DaemonReady) -> list[SchedCommand]:
        ranks = self._state.ranks
        rank = ranks.get(event.rank)
        commands: list[SchedCommand] = []
        if rank.epoch != event.epoch:
            if rank.epoch:
                self._state.counters["daemon_restarts"] += 1
            commands += self._reporter.rank_gone(event.rank)
            rank.store_up = True
        if event.rank == ranks.lookup_rank and (rank.epoch != event.epoch or not event.attached):
            self._matcher.forget_all()
        rank.epoch = event.epoch
        rank.attached = event.attached
        rank.lost = rank.late = False
        rank.acks = {}
        rank.heard()
        commands += self._judge.repeat(rank)
        if rank.owes_reset:
            rank.owes_reset = False
            commands += self._state.send_all([rank], ResetStore())
        return commands

    def _daemon_lost(self, event: DaemonLost) -> list[SchedCommand]:
        rank = self._state.ranks.get(event.rank)
        if not rank.lost:
            self._state.counters["daemons_lost"] += 1
        rank.lost = True
        rank.late = False
        rank.acks = {}
        if event.rank == self._state.ranks.lookup_rank:
            self._matcher.forget_all()
        if not event.dead:
            return []
        rank.heard()
        return self._reporter.rank_gone(event.rank)

    def _store_changed(self, event: StoreChanged) -> list[SchedCommand]:
        self._state.ranks.get(event.rank).store_up = event.up
        return []

    def _request_added(self, event: RequestAdded) -> list[SchedCommand]:
        return [*self._drop_request(event.request_id), *self._matcher.added(event)]

    def _request_finished(self, event: RequestFinished) -> list[SchedCommand]:
        return self._drop_request(event.request_id)

    def _drop_request(self, request_id: str) -> list[SchedCommand]:
        """Forget a request. Its jobs go on; a load that vLLM still waits for is cancelled."""
        state = self._state
        record = state.requests.get(request_id)
        if record is None:
            return []
        commands = self._matcher.drop(record)
        pending = state.pending.get(request_id)
        if pending is not None and pending.asynchronous:
            # vLLM keeps the blocks until the load is reported ended, so it must begin.
            state.pending[request_id] = msgspec.structs.replace(pending, cancelled=True)
        elif pending is not None:
            del state.pending[request_id]
            commands += self._matcher.release(pending.lookup_id)
        if record.async_job:
            state.cancel[record.async_job] = None
        del state.requests[request_id]
        state.active.pop(request_id, None)
        return commands

    def _plan_acked(self, event: PlanAcked) -> list[SchedCommand]:
        overdue_before_ns = event.now_ns - self._state.config.ack_timeout_ns
        self._state.ranks.acked(event.rank, event.step, overdue_before_ns)
        return []

    def _jobs_reported(self, event: JobsReported) -> list[SchedCommand]:
        return self._reporter.ended(event.rank, event.ends)

    def _reset_asked(self, _event: ResetAsked) -> list[SchedCommand]:
        """Forget what is stored; what was computed before must not come back into the store."""
        state = self._state
        commands: list[SchedCommand] = []
        for record in state.requests.values():
            commands += self._matcher.drop(record)
            record.stored_until = record.saved_until = 0
            if record.blocks:
                record.save_bar = SaveBar.UNTIL_PREEMPTED
            state.refresh_active(record)
        self._judge.taint_all()
        state.counters["resets"] += 1
        for rank in state.ranks.all():
            rank.owes_reset = rank.lost
        return [*commands, *state.send_all(state.ranks.all(), ResetStore())]
