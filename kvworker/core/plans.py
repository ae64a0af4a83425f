"""Plans: what a scheduler side wants of a step, checked and sorted into batches."""

from typing import Union

from kvcommon import reasons
from kvcommon.ids import BlockHash
from kvcommon.keys import store_key
from kvcommon.layout import GroupLayout
from kvcommon.messages import LoadJob, PlanAck, SaveJob, StepPlan
from kvworker.core.engines import Engine
from kvworker.core.jobs import Block, Job, JobBook, JobKey
from kvworker.core.kernel import Kernel
from kvworker.core.load_batch import MAX_STEP
from kvworker.core.loads import Loads
from kvworker.core.saves import Saves

_Batches = dict[int, tuple[GroupLayout, list[Job]]]


class Plans:
    """Takes in plans. A bad job ends as failed; it is never an exception."""

    def __init__(self, kernel: Kernel, book: JobBook, saves: Saves, loads: Loads) -> None:
        self._kernel = kernel
        self._book = book
        self._saves = saves
        self._loads = loads

    def take(self, engine: Engine, plan: StepPlan) -> None:
        """Acknowledge a plan and begin what can be begun of it."""
        self._kernel.to_scheduler(engine.key, PlanAck(step=plan.step))
        engine.steps_epoch = engine.scheduler_epoch
        layerwise: _Batches = {}
        asynchronous: _Batches = {}
        saves: _Batches = {}
        refused = False
        for load in plan.loads:
            batches = layerwise if load.layerwise else asynchronous
            if not self._sort(engine, plan.step, load, batches):
                refused |= load.layerwise
        for save in plan.saves:
            self._sort(engine, plan.step, save, saves)
        if engine.attached:
            self._loads.plan(
                engine,
                plan.step,
                layerwise=tuple(layerwise.values()),
                asynchronous=tuple(asynchronous.values()),
                refused=refused,
            )
        for layout, jobs in saves.values():
            self._saves.plan(engine, plan.step, layout, jobs)

    def _sort(
        self, engine: Engine, step: int, wanted: Union[LoadJob, SaveJob], batches: _Batches
    ) -> bool:
        """Put a job into its batch. False if it was refused, and has ended."""
        key = JobKey(engine.key, engine.scheduler_epoch, wanted.job_id)
        if self._book.knows(key):
            self._kernel.count("protocol_errors", what="repeated-job")
            return True
        layout = engine.group(wanted.group)
        reason = self._obstacle(engine, step, wanted, layout)
        job = _job(engine, key, step, wanted)
        if reason or layout is None:
            self._book.refuse(job, reason)
            return False
        self._book.admit(job)
        batches.setdefault(layout.group, (layout, []))[1].append(job)
        return True

    def _obstacle(
        self,
        engine: Engine,
        step: int,
        wanted: Union[LoadJob, SaveJob],
        layout: GroupLayout | None,
    ) -> str:
        """Say why a job cannot be done, if it cannot."""
        if not engine.attached:
            return reasons.DAEMON_NOT_ATTACHED
        ids = wanted.block_ids
        if (
            layout is None
            or not 0 < step <= MAX_STEP
            or len(ids) != len(wanted.block_hashes)
            or any(not 0 < block_id < layout.num_blocks for block_id in ids)
        ):
            self._kernel.count("protocol_errors", what="bad-job")
            return reasons.BAD_PLAN
        if len(self._book.open) >= self._kernel.config.max_open_jobs:
            return reasons.OVERLOAD
        return ""


def _job(engine: Engine, key: JobKey, step: int, wanted: Union[LoadJob, SaveJob]) -> Job:
    """Make the record of a job, its blocks named as this rank names them."""
    is_load = isinstance(wanted, LoadJob)
    hashes = wanted.block_hashes
    keys: list[str] = [store_key(engine.mark, wanted.group, BlockHash(each)) for each in hashes]
    # A bad plan may have too few hashes; its blocks are reported all the same.
    keys += [""] * (len(wanted.block_ids) - len(keys))
    return Job(
        key=key,
        engine=engine,
        kind="load" if is_load else "save",
        request_id=wanted.request_id,
        step=step,
        group=wanted.group,
        blocks=tuple(
            Block(block_id=block_id, key=name)
            for block_id, name in zip(wanted.block_ids, keys, strict=False)
        ),
        incarnation=engine.incarnation,
        layerwise=isinstance(wanted, LoadJob) and wanted.layerwise,
        computed=isinstance(wanted, SaveJob) and wanted.computed,
    )
