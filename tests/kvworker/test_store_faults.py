"""What a store can do to a daemon, one fault at a time: each has its own outcome and counter."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcommon.messages import (
    JobEnd,
    JobOutcome,
    JobsEnded,
    LoadJob,
    Lookup,
    LookupGroup,
    LookupResult,
    PlanAck,
    StepBegun,
    StepPlan,
    StepVerdict,
)
from tests.support.client import Client
from tests.support.daemonproc import DaemonProcess, daemon
from tests.support.engine import HASHES, attach, lookup, save
from tests.support.fakemodel import FakeModel


class Engine:
    """Both sides of an engine on a daemon whose store has faults."""

    def __init__(
        self, running: DaemonProcess, control: Client, data: Client, sched: Client
    ) -> None:
        self.daemon = running
        self.control = control
        self.data = data
        self.scheduler = sched
        self.model = FakeModel()
        attach(control, sched, self.model)

    def save(self, step: int) -> JobEnd:
        (end,) = save(self.scheduler, self.data, step, (1, 2)).ends
        return end

    def load(self, step: int) -> JobEnd:
        job = LoadJob(
            job_id=step,
            request_id="r",
            group=0,
            block_ids=(3, 4),
            block_hashes=HASHES,
            layerwise=False,
        )
        self.scheduler.say(StepPlan(step=step, loads=(job,)))
        self.scheduler.hear(PlanAck)
        self.data.say(StepBegun(step=step))
        (end,) = self.scheduler.hear(JobsEnded).ends
        return end

    def counted(self, reason: str) -> float:
        metrics = self.daemon.status().metrics
        return sum(value for name, value in metrics.items() if f'reason="{reason}"' in name)


@contextmanager
def engine(tmp_path: Path, *rules: dict[str, Any]) -> Iterator[Engine]:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"store": rules}))
    with (
        daemon("--inject", str(plan), "--save", "layerwise") as running,
        Client(running.endpoint, "model", epoch=5) as control,
        Client(running.endpoint, "data", epoch=5) as data,
        Client(running.endpoint, "scheduler") as scheduler,
    ):
        made = Engine(running, control, data, scheduler)
        yield made
        made.model.close()


def rule(call: str, outcome: str, **more: Any) -> dict[str, Any]:
    return {"call": call, "what": "fail", "outcome": outcome, **more}


#: The memory store copies from its own memory; without that, as from another node.
REMOTE = {"call": "local", "what": "fail"}


@pytest.mark.parametrize(
    ("fault", "outcome", "reason"),
    [
        pytest.param(
            rule("put_start", "full"), JobOutcome.FAILED, "store-full", id="the store is full"
        ),
        pytest.param(
            rule("put_start", "exists"),
            JobOutcome.SKIPPED,
            "exists",
            id="a dead writer blocks the key",
        ),
        pytest.param(
            rule("put_ranges", "failed"),
            JobOutcome.FAILED,
            "transfer-failed",
            id="the bytes do not arrive",
        ),
        pytest.param(
            {"call": "put_ranges", "what": "truncate", "outcome": "failed"},
            JobOutcome.FAILED,
            "transfer-failed",
            id="half of the bytes arrive",
        ),
        pytest.param(
            rule("put_end", "down"), JobOutcome.FAILED, "store-down", id="the store dies before end"
        ),
    ],
)
def test_saves(tmp_path: Path, fault: dict[str, Any], outcome: JobOutcome, reason: str) -> None:
    with engine(tmp_path, {**fault, "times": 1}) as it:
        end = it.save(1)
        assert (end.outcome, end.reason) == (outcome, reason)
        assert it.counted(reason) >= 1
        # Nothing is published of it, and the next save goes well.
        assert lookup(it.scheduler, 1) == 0
        again = it.save(2)
        assert again.outcome in {JobOutcome.DONE, JobOutcome.SKIPPED}


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        pytest.param([rule("get_start", "miss")], "evicted", id="evicted after the lookup"),
        pytest.param(
            [REMOTE, rule("get_ranges", "expired")], "expired", id="the lease ends while reading"
        ),
        pytest.param(
            [REMOTE, rule("get_ranges", "failed")],
            "transfer-failed",
            id="the owner of the memory is dead",
        ),
        pytest.param([rule("get_start", "down")], "store-down", id="the master is gone"),
        pytest.param(
            [REMOTE, {"call": "get_ranges", "what": "truncate", "outcome": "failed"}],
            "transfer-failed",
            id="half of the bytes arrive",
        ),
    ],
)
def test_loads(tmp_path: Path, faults: list[dict[str, Any]], reason: str) -> None:
    once = [fault if fault is REMOTE else {**fault, "times": 1} for fault in faults]
    with engine(tmp_path, *once) as it:
        wanted = [it.model.fill(block, seed=block) for block in (1, 2)]
        assert it.save(1).outcome is JobOutcome.DONE
        assert lookup(it.scheduler, 1) == 2
        end = it.load(2)
        assert (end.outcome, end.reason) == (JobOutcome.FAILED, reason)
        assert end.failed_blocks == (3, 4)
        assert it.counted(reason) >= 1
        assert it.load(3).outcome is JobOutcome.DONE
        assert [it.model.block(block) for block in (3, 4)] == wanted


def test_a_master_that_comes_back_empty_is_a_miss(tmp_path: Path) -> None:
    with engine(tmp_path, rule("find", "miss", after=1, times=1)) as it:
        assert it.save(1).outcome is JobOutcome.DONE
        assert lookup(it.scheduler, 1) == 2
        assert lookup(it.scheduler, 2) == 0
        assert it.counted("not-stored") >= 1


def test_the_breaker_opens_and_closes_by_a_probe(tmp_path: Path) -> None:
    with engine(tmp_path, rule("find", "down", times=3), rule("probe", "down", times=1)) as it:
        assert it.save(1).outcome is JobOutcome.DONE
        for number in (1, 2, 3):
            groups = (LookupGroup(group=0, block_hashes=HASHES),)
            it.scheduler.say(Lookup(lookup_id=number, request_id="r", groups=groups))
            while not isinstance(it.scheduler.hear_anything(), LookupResult):
                pass
        while it.daemon.status().metrics["kvferry_store_up"] == 0:
            it.scheduler.hear_anything()
        changes = [n for n in it.daemon.status().metrics if "store_changes" in n]
        assert len(changes) == 2


def test_a_store_that_hangs_holds_up_nobody_else(tmp_path: Path) -> None:
    hang = {"call": "find", "what": "hang", "seconds": 30, "times": 1}
    with engine(tmp_path, hang) as it:
        groups = (LookupGroup(group=0, block_hashes=HASHES),)
        it.scheduler.say(Lookup(lookup_id=1, request_id="r", groups=groups))
        # The lookup hangs in its thread; the daemon acknowledges, saves, loads and answers.
        wanted = it.model.fill(1, seed=7)
        assert it.save(1).outcome is JobOutcome.DONE
        assert it.load(2).outcome is JobOutcome.DONE
        assert it.model.block(3) == wanted
        assert it.daemon.status().metrics["kvferry_lookups_open"] == 1


def test_a_hanging_save_holds_up_no_load(tmp_path: Path) -> None:
    hang = {"call": "put_ranges", "what": "hang", "seconds": 30, "after": 3}
    with engine(tmp_path, hang) as it:
        assert it.save(1).outcome is JobOutcome.DONE
        it.data.say(StepBegun(step=2))
        it.scheduler.say(StepVerdict(step=2))
        assert it.load(3).outcome is JobOutcome.DONE
