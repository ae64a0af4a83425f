"""From a scheduled step to its plan: the loads that vLLM has admitted and the saves that fall due.

The plan of a step is the same for every rank. A save is planned only while every rank is served;
a load is always planned, because vLLM counts on it: on a rank that cannot be told it ends as
failed at once, and the model side of that rank reports its blocks.
"""

from collections.abc import Sequence

from kvcommon.messages import JobEnd, JobOutcome, LoadJob, SaveJob, StepPlan
from kvcommon.reasons import DAEMON_LOST
from kvsched.core.commands import HoldBlocks, ModelLoad, SchedCommand, SendToDaemon, TellModel
from kvsched.core.events import ScheduledRequest, StepScheduled
from kvsched.core.jobs import Job, JobKind
from kvsched.core.matching import GROUP, Matcher
from kvsched.core.planning import MAX_SKIPS, SavePart, full_blocks, plan_saves, rewrite, savable_end
from kvsched.core.ranks import Rank
from kvsched.core.reports import Reporter
from kvsched.core.requests import PendingLoad, RequestRecord, SaveBar
from kvsched.core.state import CoreState
from kvsched.core.steps import SaveNote, StepRecord
from kvsched.core.worth import MIN_STEP_TOKENS


class Planner:
    """Makes the plan of each step."""

    def __init__(self, state: CoreState, matcher: Matcher, reporter: Reporter) -> None:
        self._state = state
        self._matcher = matcher
        self._reporter = reporter

    def scheduled(self, event: StepScheduled) -> list[SchedCommand]:
        """Plan a step. Order: ``HoldBlocks``, then messages by rank, then ``TellModel``."""
        sends: list[SchedCommand] = []
        for request_id in event.preempted:
            sends += self._preempted(request_id)
        self._state.admitted.clear()
        told = [rank for rank in self._state.ranks.all() if rank.attached and not rank.lost]
        loads, jobs = self._open_loads(event.step)
        known = [pair for request in event.requests if (pair := self._update(request))]
        rewrite(self._state.spoilt, known, self._state.config.block_size)
        saves = self._open_saves(event.step, known)
        jobs += [job for job, _, _ in saves]
        if jobs:
            plan = StepPlan(
                step=event.step,
                loads=tuple(loads),
                saves=tuple(_save_job(job, part) for job, part, _ in saves),
            )
            sends += self._send_plan(plan, told, event.now_ns)
        self._note_step(event, jobs, tuple(note for _, _, note in saves), told)
        commands: list[SchedCommand] = [
            HoldBlocks(job_id=job.job_id, block_ids=job.block_ids) for job in jobs
        ]
        commands += sends
        commands += self._tell_model(event.step, jobs)
        commands += self._end_untold(jobs, told)
        return commands

    def _preempted(self, request_id: str) -> list[SchedCommand]:
        """The request lost its blocks. Jobs in flight keep theirs.

        It may have been admitted again since (after a reset): then its table is the new one.
        """
        record = self._state.requests.get(request_id)
        if record is None:
            return []
        blocks = record.blocks
        record.clear_blocks()
        record.abandoned = False
        record.skips = 0
        commands: list[SchedCommand] = []
        if request_id in self._state.admitted:
            record.set_blocks(tuple(blocks))
        else:
            record.offer = None
            commands = self._matcher.drop(record)
        self._state.counters["preemptions"] += 1
        self._state.refresh_active(record)
        return commands

    def _open_loads(self, step: int) -> tuple[list[LoadJob], list[Job]]:
        """Turn all pending loads into jobs."""
        messages, jobs = [], []
        for load in self._state.pending.values():
            job = self._open(
                JobKind.ASYNC_LOAD if load.asynchronous else JobKind.LAYERWISE_LOAD,
                step,
                load,
                request_id=load.request_id,
                serial=load.serial,
            )
            record = self._state.find(load.request_id, load.serial)
            if record is not None and load.asynchronous:
                record.async_job = job.job_id
            for block_id in load.block_ids:
                self._state.spoilt.pop(block_id, None)
            if load.cancelled:
                self._state.cancel[job.job_id] = None
            jobs.append(job)
            messages.append(_load_job(job, load))
        pending = list(self._state.pending)
        self._state.pending.clear()
        for request_id in pending:
            if request_id in self._state.requests:
                self._state.refresh_active(self._state.requests[request_id])
        return messages, jobs

    def _update(self, request: ScheduledRequest) -> tuple[RequestRecord, ScheduledRequest] | None:
        """Take over what the step says of a request's blocks and hashes."""
        record = self._state.requests.get(request.request_id)
        if record is None:
            self._state.counters["unknown_requests"] += 1
            return None
        if request.replace:
            record.set_blocks(request.block_ids)
            record.full_seen = 0
            if record.save_bar is SaveBar.UNTIL_REPLACED:
                record.save_bar = SaveBar.NONE
        elif record.has_table:
            record.blocks.extend(request.block_ids)
        record.hashes.extend(request.new_block_hashes)
        return (record, request) if record.has_table else None

    def _open_saves(
        self, step: int, known: Sequence[tuple[RequestRecord, ScheduledRequest]]
    ) -> list[tuple[Job, SavePart, SaveNote]]:
        """Open the save jobs of a step and note the tables they were planned from."""
        state = self._state
        available = state.config.can_save and state.ranks.serving and state.ranks.store_up
        saves = []
        for record, request in known:
            if available:
                plan = plan_saves(record, request, state.config, state.ledger, state.spoilt)
                for part in plan.parts:
                    job = self._open(
                        JobKind.SAVE,
                        step,
                        part,
                        request_id=record.request_id,
                        serial=record.serial,
                    )
                    saves.append((job, part, _note(job, record)))
                if plan.saved_until > record.saved_until:
                    record.skips = 0
                record.saved_until = plan.saved_until
                state.counters["saves_skipped_held"] += plan.num_skipped
                skipped = plan.num_skipped + plan.num_deferred > 0
            else:
                skipped = record.next_save < savable_end(record, request, state.config)
            record.full_seen = full_blocks(request, state.config)
            if skipped:
                self._skipped(record, available=available)
            state.refresh_active(record)
        return saves

    def _skipped(self, record: RequestRecord, *, available: bool) -> None:
        """A save fell due and was not planned: it is tried again, but not for ever."""
        config = self._state.config
        if not available:
            self._state.counters["saves_skipped_unavailable"] += 1
        if record.full_seen < record.num_prompt_tokens // config.block_size:
            return
        record.skips += 1
        if record.skips > MAX_SKIPS or not (available or config.save_decode):
            record.abandoned = True
            self._state.counters["saves_abandoned"] += 1

    def _open(
        self,
        kind: JobKind,
        step: int,
        what: PendingLoad | SavePart,
        *,
        request_id: str,
        serial: int,
    ) -> Job:
        job = Job(
            job_id=self._state.ledger.new_id(),
            kind=kind,
            step=step,
            request_id=request_id,
            serial=serial,
            first_block=what.first_block,
            block_ids=what.block_ids,
            block_hashes=what.block_hashes,
            waiting=list(self._state.ranks.named),
        )
        self._state.ledger.add(job)
        self._state.counters[f"jobs.{kind.value}"] += 1
        return job

    def _send_plan(self, plan: StepPlan, told: list[Rank], now_ns: int) -> list[SendToDaemon]:
        for rank in told:
            self._state.ranks.sent_plan(rank.rank, plan.step, now_ns)
        return self._state.send_all(told, plan)

    def _note_step(
        self, event: StepScheduled, jobs: list[Job], saves: tuple[SaveNote, ...], told: list[Rank]
    ) -> None:
        num_tokens = sum(request.num_scheduled_tokens for request in event.requests)
        has_loads = any(job.kind is JobKind.LAYERWISE_LOAD for job in jobs)
        if jobs or num_tokens >= MIN_STEP_TOKENS:
            self._state.steps.add(
                StepRecord(
                    step=event.step,
                    planned_ns=event.now_ns,
                    num_tokens=num_tokens,
                    has_loads=has_loads,
                    ranks={rank.rank: rank.epoch for rank in told},
                    saves=saves,
                    jobs=tuple(job.job_id for job in jobs),
                )
            )

    def _tell_model(self, step: int, jobs: list[Job]) -> list[TellModel]:
        cancel = tuple(job_id for job_id in self._state.cancel if self._state.ledger.get(job_id))
        self._state.cancel.clear()
        loads = tuple(
            ModelLoad(
                job_id=job.job_id,
                request_id=job.request_id,
                layerwise=job.kind is JobKind.LAYERWISE_LOAD,
                block_ids=job.block_ids,
            )
            for job in jobs
            if not job.is_save
        )
        saves = any(job.is_save for job in jobs)
        if not (loads or saves or cancel):
            return []
        return [TellModel(step=step, loads=loads, saves=saves, cancel=cancel)]

    def _end_untold(self, jobs: list[Job], told: list[Rank]) -> list[SchedCommand]:
        """End the jobs on the ranks whose daemons never hear of them."""
        commands: list[SchedCommand] = []
        heard = {rank.rank for rank in told}
        ends = tuple(
            JobEnd(job_id=job.job_id, outcome=JobOutcome.FAILED, reason=DAEMON_LOST) for job in jobs
        )
        for rank in self._state.ranks.named:
            if ends and rank not in heard:
                commands += self._reporter.ended(rank, ends)
        return commands


def _load_job(job: Job, load: PendingLoad) -> LoadJob:
    return LoadJob(
        job_id=job.job_id,
        request_id=job.request_id,
        group=GROUP,
        block_ids=job.block_ids,
        block_hashes=job.block_hashes,
        layerwise=not load.asynchronous,
        lookup_id=load.lookup_id,
    )


def _save_job(job: Job, part: SavePart) -> SaveJob:
    return SaveJob(
        job_id=job.job_id,
        request_id=job.request_id,
        group=GROUP,
        block_ids=job.block_ids,
        block_hashes=job.block_hashes,
        computed=part.computed,
    )


def _note(job: Job, record: RequestRecord) -> SaveNote:
    return SaveNote(
        job_id=job.job_id,
        request_id=job.request_id,
        serial=job.serial,
        first_block=job.first_block,
        blocks=record.blocks,
        num_blocks=len(record.blocks),
    )
