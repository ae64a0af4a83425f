"""A layerwise load that is given up: the daemon is told, and stops between two layers."""

import json
import threading
from pathlib import Path

from kvcommon.memory.page import ProgressPage
from kvcommon.messages import (
    CancelJobs,
    JobOutcome,
    JobsEnded,
    LoadJob,
    PlanAck,
    StepBegun,
    StepPlan,
)
from kvsched.link import DaemonLink
from kvsched.metadata import StepMetadata
from tests.support.client import Client
from tests.support.daemonproc import daemon as real_daemon
from tests.support.engine import HASHES, attach, save
from tests.support.fakedaemon import FakeDaemon, until
from tests.support.fakemodel import NUM_LAYERS, FakeModel
from tests.support.modelside import (
    NAMES,
    StillAttachment,
    later,
    layerwise,
    loading,
    model_side,
    run_step,
)


def test_a_load_that_is_given_up_is_cancelled() -> None:
    """What the daemon wrote after this would meet what is recomputed."""
    page = ProgressPage.create()
    with FakeDaemon() as daemon:
        link = DaemonLink(daemon.context, daemon.endpoint, 0, "data")
        # Past its deadline as soon as it looks at the clock.
        model = model_side(StillAttachment(), page, link, load_timeout_ms=0)
        run_step(model, StepMetadata(1))
        page.publish(5, 1, False)
        model.bind(loading(5, layerwise(1, 3, 4), layerwise(2, 9), later(7, 8)))
        daemon.hear(StepBegun)
        model.wait_for_layer(NAMES[0])
        assert daemon.silent()
        model.wait_for_layer(NAMES[1])
        assert daemon.hear(CancelJobs) == CancelJobs(step=5, job_ids=(1, 2))
        for name in NAMES[2:]:
            model.wait_for_layer(name)
        assert model.failed_blocks() == {3, 4, 9}
        assert daemon.silent(), "once is enough, and the asynchronous load goes on"
        model.clear()
        link.close()
    page.close()


def test_the_daemon_stops_between_two_layers(tmp_path: Path) -> None:
    """The second layer takes two seconds; it is cancelled in them, and the third is not read."""
    slow = {"call": "get_ranges", "what": "delay", "seconds": 2, "after": 1, "times": 1}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"store": [{"call": "local", "what": "fail"}, slow]}))
    model = FakeModel()
    with (
        real_daemon("--inject", str(plan)) as running,
        Client(running.endpoint, "model", epoch=5) as control,
        Client(running.endpoint, "data", epoch=5) as data,
        Client(running.endpoint, "scheduler") as scheduler,
    ):
        attach(control, scheduler, model)
        stored = [model.fill(block, seed=block) for block in (1, 2)]
        save(scheduler, data, 1, (1, 2))
        job = LoadJob(
            job_id=2,
            request_id="r",
            group=0,
            block_ids=(3, 4),
            block_hashes=HASHES,
            layerwise=True,
        )
        scheduler.say(StepPlan(step=2, loads=(job,)))
        scheduler.hear(PlanAck)
        data.say(StepBegun(step=2))
        waiting = threading.Event()
        until(lambda: model.page.read(2) == (1, False), lambda ms: waiting.wait(ms / 1e3))
        data.say(CancelJobs(step=2, job_ids=(2,)))
        (end,) = scheduler.hear(JobsEnded).ends
        assert end.outcome is JobOutcome.CANCELLED
        assert model.page.read(2) == (NUM_LAYERS, True)
        layer = len(stored[0]) // NUM_LAYERS
        for block, bytes_ in zip((3, 4), stored, strict=True):
            assert model.block(block)[:layer] == bytes_[:layer]
            assert model.block(block)[2 * layer :] == bytes(layer)
    model.close()
