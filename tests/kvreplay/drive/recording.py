"""A small recording of a real daemon: two blocks are looked up, saved, and loaded twice."""

from pathlib import Path

from kvcommon.messages import JobsEnded, LoadJob, PlanAck, StepBegun, StepPlan
from kvreplay.loading import LogSet, open_logs
from tests.support.client import Client
from tests.support.daemonproc import daemon
from tests.support.engine import HASHES, attach, lookup, save
from tests.support.fakemodel import FakeModel


def load(scheduler: Client, data: Client, job_id: int, *, layerwise: bool) -> None:
    """Load the two blocks in a step of the same number."""
    first = 2 * job_id
    job = LoadJob(
        job_id=job_id,
        request_id=f"load-{job_id}",
        group=0,
        block_ids=(first, first + 1),
        block_hashes=HASHES,
        layerwise=layerwise,
    )
    scheduler.say(StepPlan(step=job_id, loads=(job,)))
    scheduler.hear(PlanAck)
    data.say(StepBegun(step=job_id))
    scheduler.hear(JobsEnded)


def record(directory: Path) -> LogSet:
    """Record into a directory."""
    with daemon("--event-log", str(directory)) as running:
        model = FakeModel()
        with (
            Client(running.endpoint, "scheduler") as scheduler,
            Client(running.endpoint, "model") as control,
            Client(running.endpoint, "data", epoch=control.channel.epoch) as data,
        ):
            attach(control, scheduler, model)
            lookup(scheduler, 1)
            save(scheduler, data, 1, (1, 2))
            lookup(scheduler, 2)
            load(scheduler, data, 2, layerwise=True)
            load(scheduler, data, 3, layerwise=False)
        model.close()
    return open_logs([directory])
