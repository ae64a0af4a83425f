"""Objects that were cut short, from the write to the day when they are replaced, on Mooncake."""

import json
import time
from pathlib import Path

import pytest

from kvcommon.messages import (
    JobEnd,
    JobOutcome,
    JobsEnded,
    LoadJob,
    PlanAck,
    StepBegun,
    StepPlan,
)
from localmaster import LocalMaster, master_binary
from tests.support.client import Client
from tests.support.daemonproc import daemon
from tests.support.engine import HASHES, attach, lookup, save
from tests.support.fakemodel import FakeModel

LEASE_MS = 500
PATIENCE_S = 60


def load(scheduler: Client, data: Client, step: int) -> JobEnd:
    job = LoadJob(
        job_id=step,
        request_id="r",
        group=0,
        block_ids=(3, 4),
        block_hashes=HASHES,
        layerwise=False,
    )
    scheduler.say(StepPlan(step=step, loads=(job,)))
    scheduler.hear(PlanAck)
    data.say(StepBegun(step=step))
    (end,) = scheduler.hear(JobsEnded).ends
    return end


@pytest.mark.skipif(master_binary() is None, reason="the mooncake wheel is not installed")
def test_a_write_that_was_cut_short_fails_one_load_and_is_replaced(tmp_path: Path) -> None:
    cut = {"call": "put_objects", "what": "truncate", "outcome": "failed", "times": 1}
    plan, mooncake = tmp_path / "plan.json", tmp_path / "mooncake.json"
    plan.write_text(json.dumps({"store": [cut]}))
    with LocalMaster(f"--default_kv_lease_ttl={LEASE_MS}") as master:
        settings = {
            "master_server_address": master.address,
            "global_segment_size": "64MiB",
            "store_lease_ms": LEASE_MS,
        }
        mooncake.write_text(json.dumps(settings))
        options = ("--store", "mooncake", "--mooncake-config", str(mooncake), "--save", "auto")
        model = FakeModel()
        with (
            daemon(*options, "--inject", str(plan)) as running,
            Client(running.endpoint, "model", epoch=5) as control,
            Client(running.endpoint, "data", epoch=5) as data,
            Client(running.endpoint, "scheduler") as scheduler,
        ):
            attach(control, scheduler, model)
            wanted = [model.fill(block, seed=block) for block in (1, 2)]
            (end,) = save(scheduler, data, 1, (1, 2)).ends
            assert end.outcome is JobOutcome.FAILED
            assert lookup(scheduler, 1) == 2, "they are there, but of half the size"
            end = load(scheduler, data, 2)
            assert (end.outcome, end.reason) == (JobOutcome.FAILED, "evicted")
            assert lookup(scheduler, 2) == 0, "or every request would fail"
            assert running.status().metrics["kvferry_store_objects_of_wrong_size"] == 2
            assert "bytes instead of" in running.log
            deadline, step = time.monotonic() + PATIENCE_S, 2
            while lookup(scheduler, step) != 2:
                assert time.monotonic() < deadline, "they stay in the way"
                step += 1
                save(scheduler, data, step, (1, 2))
            assert load(scheduler, data, step + 1).outcome is JobOutcome.DONE
            assert [model.block(block) for block in (3, 4)] == wanted
        model.close()
