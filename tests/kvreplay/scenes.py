"""Small hand-made logs of a scheduler side and one daemon, built from the real events."""

from pathlib import Path

import msgspec

from kvcommon import messages as msg
from kvcommon import reasons
from kvcommon.eventlog import LogWriter, make_header, stimulus
from kvcommon.ids import BlockHash, Fingerprint
from kvcommon.keys import store_key
from kvreplay.loading import LogSet, open_logs
from kvreplay.ops import plan_jobs
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome

ENGINE = "eng-1"
KEY = f"{ENGINE}#0"
SCHED = "kvsched-1"
WORKER = "kvworker-1"
REQUEST = "req-abc"
HASHES = tuple(bytes([number]) * 32 for number in range(1, 5))
MS = 1_000_000


class Config(msgspec.Struct, frozen=True, kw_only=True):
    size: int = 1


def key(block: bytes) -> str:
    return store_key(Fingerprint("f" * 24), 0, BlockHash(block))


class Scene:
    """Writes both logs; every call is one record and moves the clock by one millisecond."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_ns = 1000 * MS
        self.seqs = {SCHED: 0, WORKER: 0}
        self.writers = {
            SCHED: LogWriter(
                directory,
                make_header("kvsched", SCHED, 1, Config(), versions={}, info={"engine": ENGINE}),
            ),
            WORKER: LogWriter(directory, make_header("kvworker", WORKER, 2, Config(), versions={})),
        }

    def sched(
        self, event: sched.SchedEvent, *commands: sched_do.SchedCommand, cause: str = ""
    ) -> str:
        return self._record(SCHED, event, commands, cause)

    def worker(
        self, event: work.WorkerEvent, *commands: work_do.WorkerCommand, cause: str = ""
    ) -> str:
        return self._record(WORKER, event, commands, cause)

    def to_worker(self, body: msg.SchedulerToDaemon, *commands: work_do.WorkerCommand) -> str:
        """The scheduler side's newest record sent this to the daemon."""
        event = work.SchedulerSaid(now_ns=self.tick(), engine=KEY, epoch=1, body=body)
        return self.worker(event, *commands, cause=stimulus(SCHED, self.seqs[SCHED]))

    def model(self, body: msg.ModelToDaemon, *commands: work_do.WorkerCommand) -> str:
        event = work.ModelSaid(now_ns=self.tick(), engine=KEY, epoch=3, body=body)
        return self.worker(event, *commands)

    def tick(self, milliseconds: int = 1) -> int:
        self.now_ns += milliseconds * MS
        return self.now_ns

    def last(self, log: str) -> str:
        return stimulus(log, self.seqs[log])

    def close(self) -> LogSet:
        for writer in self.writers.values():
            writer.close()
        return open_logs([self.directory])

    def _record(
        self,
        log: str,
        event: msgspec.Struct,
        commands: tuple[msgspec.Struct, ...],
        cause: str,
    ) -> str:
        self.seqs[log] += 1
        self.writers[log].record(self.seqs[log], cause, event, commands)
        return self.last(log)


def lookup() -> msg.Lookup:
    groups = (msg.LookupGroup(group=0, block_hashes=HASHES),)
    return msg.Lookup(lookup_id=7, request_id=REQUEST, groups=groups)


def add_request(scene: Scene) -> None:
    """vLLM takes the request in, and it is looked up."""
    event = sched.RequestAdded(
        now_ns=scene.tick(), request_id=REQUEST, num_tokens=70, block_hashes=HASHES
    )
    scene.sched(event, sched_do.SendToDaemon(rank=0, body=lookup()))
    scene.to_worker(
        lookup(), work_do.FindKeys(op=1, engine=KEY, keys=tuple(key(one) for one in HASHES))
    )


def answer_lookup(scene: Scene, num_blocks: int, reason: str = "") -> None:
    hits = (msg.GroupHit(group=0, num_blocks=num_blocks),)
    result = msg.LookupResult(lookup_id=7, hits=hits, reason=reason)
    outcomes = (Outcome.OK,) * num_blocks + (Outcome.MISS,) * (4 - num_blocks)
    scene.worker(
        work.KeysFound(now_ns=scene.tick(), op=1, outcomes=outcomes),
        work_do.SendToScheduler(engine=KEY, body=result),
    )
    scene.sched(
        sched.LookupAnswered(now_ns=scene.tick(), rank=0, result=result),
        cause=scene.last(WORKER),
    )


def answer_match(scene: Scene, num_tokens: int | None, reason: str = "") -> None:
    scene.sched(
        sched.MatchAsked(
            now_ns=scene.tick(), request_id=REQUEST, num_tokens=70, num_local_tokens=0
        ),
        sched_do.AnswerMatch(request_id=REQUEST, num_tokens=num_tokens, reason=reason),
    )


def load_job() -> msg.LoadJob:
    return msg.LoadJob(
        job_id=11,
        request_id=REQUEST,
        group=0,
        block_ids=(21, 22, 23, 24),
        block_hashes=HASHES,
        layerwise=True,
        lookup_id=7,
    )


def save_job(job_id: int = 12, request_id: str = REQUEST) -> msg.SaveJob:
    return msg.SaveJob(
        job_id=job_id,
        request_id=request_id,
        group=0,
        block_ids=(25,),
        block_hashes=(b"s" * 32,),
    )


def plan(scene: Scene, step_plan: msg.StepPlan, *commands: work_do.WorkerCommand) -> None:
    """vLLM schedules the step; the plan reaches the daemon."""
    one = sched.ScheduledRequest(
        request_id=REQUEST,
        num_computed_tokens=0,
        num_scheduled_tokens=6,
        replace=True,
        block_ids=(21, 22, 23, 24, 25),
    )
    holds = [
        sched_do.HoldBlocks(job_id=job.job_id, block_ids=job.block_ids)
        for job in plan_jobs(step_plan)
    ]
    scene.sched(
        sched.StepScheduled(now_ns=scene.tick(), step=step_plan.step, requests=(one,)),
        *holds,
        sched_do.SendToDaemon(rank=0, body=step_plan),
    )
    ack = work_do.SendToScheduler(engine=KEY, body=msg.PlanAck(step=step_plan.step))
    scene.to_worker(step_plan, ack, *commands)


def end_jobs(scene: Scene, event: work.WorkerEvent, *ends: msg.JobEnd, free: bool = True) -> None:
    """The daemon ends jobs because of an event; the scheduler side frees their blocks."""
    body = msg.JobsEnded(ends=ends)
    scene.worker(event, work_do.SendToScheduler(engine=KEY, body=body))
    held = {11: (21, 22, 23, 24), 12: (25,), 77: ()}
    frees = [sched_do.FreeBlocks(job_id=end.job_id, block_ids=held[end.job_id]) for end in ends]
    scene.sched(
        sched.JobsReported(now_ns=scene.tick(), rank=0, ends=ends),
        *(frees if free else ()),
        cause=scene.last(WORKER),
    )


def load(scene: Scene, end: msg.JobEnd, outcomes: tuple[Outcome, ...]) -> None:
    """A layerwise load in step 5 of two layers, from its plan to its end."""
    keys = tuple(key(one) for one in HASHES)
    plan(
        scene,
        msg.StepPlan(step=5, loads=(load_job(),)),
        work_do.OpenGets(op=2, engine=KEY, step=5, group=0, keys=keys),
    )
    scene.worker(work.GetsOpened(now_ns=scene.tick(), op=2, outcomes=(Outcome.OK,) * 4))
    scene.model(
        msg.StepBegun(step=5),
        work_do.LoadLayers(
            op=3,
            engine=KEY,
            step=5,
            group=0,
            keys=keys,
            block_ids=(21, 22, 23, 24),
            first_layer=0,
            end_layer=2,
            publish=True,
        ),
    )
    began = scene.now_ns
    loaded = work.LayersLoaded(
        now_ns=scene.tick(3),
        op=3,
        outcomes=outcomes,
        num_bytes=end.num_bytes,
        started_ns=began + MS,
        layer_ns=(began + 2 * MS, began + 3 * MS),
    )
    end_jobs(scene, loaded, end)


def hit(scene: Scene) -> None:
    """Four blocks are stored, loaded layerwise, and used."""
    add_request(scene)
    answer_match(scene, None)
    answer_lookup(scene, 4)
    answer_match(scene, 64)
    scene.sched(
        sched.BlocksAllocated(
            now_ns=scene.tick(),
            request_id=REQUEST,
            block_ids=(21, 22, 23, 24, 25),
            num_external_tokens=64,
        )
    )
    end = msg.JobEnd(job_id=11, outcome=msg.JobOutcome.DONE, num_bytes=4096, duration_us=2500)
    load(scene, end, (Outcome.OK,) * 4)
    finish(scene)


def miss(scene: Scene) -> None:
    add_request(scene)
    answer_match(scene, None)
    answer_lookup(scene, 0, reasons.NOT_STORED)
    answer_match(scene, 0, reasons.NOT_STORED)
    finish(scene)


def timeout(scene: Scene) -> None:
    """vLLM was told 0 after 100 ms; the answer came later."""
    add_request(scene)
    answer_match(scene, None)
    scene.tick(100)
    answer_match(scene, 0, reasons.LOOKUP_TIMEOUT)
    scene.tick(50)
    answer_lookup(scene, 4)
    finish(scene)


def failed_load(scene: Scene) -> None:
    """Blocks 23 and 24 fail."""
    add_request(scene)
    answer_lookup(scene, 4)
    answer_match(scene, 64)
    scene.sched(
        sched.BlocksAllocated(
            now_ns=scene.tick(),
            request_id=REQUEST,
            block_ids=(21, 22, 23, 24, 25),
            num_external_tokens=64,
        )
    )
    end = msg.JobEnd(
        job_id=11,
        outcome=msg.JobOutcome.FAILED,
        failed_blocks=(23, 24),
        num_bytes=2048,
        duration_us=2500,
        reason=reasons.TRANSFER_FAILED,
    )
    load(scene, end, (Outcome.OK, Outcome.OK, Outcome.FAILED, Outcome.FAILED))
    scene.sched(
        sched.StepFinished(now_ns=scene.tick(), step=5, invalid_block_ids=(23, 24)),
    )
    finish(scene)


def save(scene: Scene, *, tainted: bool, publish: bool) -> None:
    """A save in step 6, with its verdict; ``publish`` says what the daemon does."""
    keys = (key(b"s" * 32),)
    plan(
        scene,
        msg.StepPlan(step=6, saves=(save_job(),)),
    )
    scene.model(
        msg.StepBegun(step=6), work_do.OpenPuts(op=20, engine=KEY, step=6, group=0, keys=keys)
    )
    scene.worker(work.PutsOpened(now_ns=scene.tick(), op=20, outcomes=(Outcome.OK,)))
    scene.model(
        msg.LayersComputed(step=6, num_layers=2),
        work_do.WriteLayers(
            op=21,
            engine=KEY,
            step=6,
            group=0,
            keys=keys,
            block_ids=(25,),
            first_layer=0,
            end_layer=2,
        ),
    )
    scene.worker(
        work.LayersWritten(now_ns=scene.tick(), op=21, outcomes=(Outcome.OK,), num_bytes=(1024,))
    )
    verdict = msg.StepVerdict(step=6, tainted=(12,) if tainted else ())
    scene.sched(
        sched.StepFinished(now_ns=scene.tick(), step=6),
        sched_do.SendToDaemon(rank=0, body=verdict),
    )
    scene.to_worker(
        verdict,
        work_do.ClosePuts(
            op=22,
            engine=KEY,
            step=6,
            end=keys if publish else (),
            revoke=() if publish else keys,
        ),
    )
    closed = work.PutsClosed(
        now_ns=scene.tick(),
        op=22,
        ended=(Outcome.OK,) if publish else (),
        revoked=() if publish else (Outcome.OK,),
    )
    end = msg.JobEnd(
        job_id=12,
        outcome=msg.JobOutcome.CANCELLED if tainted else msg.JobOutcome.DONE,
        failed_blocks=(25,) if tainted else (),
        reason=reasons.TAINTED if tainted else "",
        num_bytes=0 if tainted else 1024,
    )
    end_jobs(scene, closed, end)


def finish(scene: Scene) -> None:
    scene.sched(sched.RequestFinished(now_ns=scene.tick(), request_id=REQUEST))
