"""Both sides of a rank: what must be in memory, and what is noticed if it is not."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from kvcommon import messages as msg
from kvreplay.drive.outcomes import Tally
from kvreplay.drive.rank import Rank, Setting, load_job, save_job
from tests.support.engine import HASHES
from tests.support.fakemodel import NUM_LAYERS, FakeModel


@dataclass
class Deaf:
    """Links to nobody; remembers what was said."""

    said: list[tuple[str, msg.Message]] = field(default_factory=list)

    def open(self, _endpoint: str, role: str, _engine: str, _rank: int, epoch: int) -> Any:
        said = self.said

        class Channel:
            def __init__(self) -> None:
                self.epoch = epoch

            def reset(self) -> None:
                pass

        class Link:
            channel = Channel()

            def say(self, body: msg.Message) -> None:
                said.append((role, body))

        return Link()

    def drop(self, _link: Any) -> None:
        pass


@pytest.fixture
def links() -> Deaf:
    return Deaf()


@pytest.fixture
def rank(links: Deaf) -> Iterator[Rank]:
    setting = Setting(
        links=links,  # type: ignore[arg-type]
        seed=0,
        word="w",
        device="cpu:0",
        endpoint="ipc://x",
        tally=Tally(),
    )
    one = Rank("e#0", setting)
    model = FakeModel()
    one.attach(model.attach(), 5)
    model.close()
    one.hello(msg.Hello(pid=1, ranks=()), 6, {})
    yield one
    one.close()


def end(job_id: int, outcome: msg.JobOutcome, *failed: int) -> msg.JobsEnded:
    return msg.JobsEnded(ends=(msg.JobEnd(job_id=job_id, outcome=outcome, failed_blocks=failed),))


def fill(rank: Rank, block: int, block_hash: bytes) -> None:
    assert rank.memory is not None
    for layer in range(NUM_LAYERS):
        rank.memory.write(0, block, layer, rank._key(0, block_hash))


BLOCKS = list(zip((1, 2), HASHES, strict=True))
PLAN = msg.StepPlan(step=1, loads=(load_job(1, 0, BLOCKS),))


def test_the_attach_is_ours_and_names_nobody_elses_bytes(rank: Rank, links: Deaf) -> None:
    (attach,) = [body for _, body in links.said if isinstance(body, msg.Attach)]
    assert attach.namespace.label == "kvreplay-w"
    assert rank.memory is not None
    assert attach.storages == rank.memory.handles()
    assert attach.pid not in {0, 1}


def test_computed_layers_hold_their_bytes_and_others_nothing_right(rank: Rank) -> None:
    job = msg.SaveJob(job_id=1, request_id="r", group=0, block_ids=(1, 2), block_hashes=HASHES)
    rank.scheduler(msg.StepPlan(step=1, saves=(job,)))
    rank.model(msg.StepBegun(step=1))
    rank.model(msg.LayersComputed(step=1, num_layers=2))
    assert rank.memory is not None
    right = [rank.memory.is_right(0, 1, layer, rank._key(0, HASHES[0])) for layer in range(3)]
    assert right == [True, True, False]
    rank.heard(end(1, msg.JobOutcome.DONE, 2))
    assert list(rank.stored) == [(0, HASHES[0])]


def test_blocks_computed_before_are_whole_when_the_plan_is_said(rank: Rank) -> None:
    rank.scheduler(msg.StepPlan(step=1, saves=(save_job(1, 0, BLOCKS),)))
    assert rank.memory is not None
    assert all(rank.memory.is_right(0, 2, layer, rank._key(0, HASHES[1])) for layer in range(3))


def test_a_right_load_is_right(rank: Rank) -> None:
    rank.scheduler(PLAN)
    rank.model(msg.StepBegun(step=1))
    for block, block_hash in BLOCKS:
        fill(rank, block, block_hash)
    rank.heard(end(1, msg.JobOutcome.DONE))
    assert rank._setting.tally.faults == []
    assert rank._setting.tally.num_checked == 2


def test_wrong_bytes_are_named(rank: Rank) -> None:
    rank.scheduler(PLAN)
    fill(rank, 1, HASHES[0])
    fill(rank, 2, HASHES[0])
    rank.heard(end(1, msg.JobOutcome.DONE))
    assert rank._setting.tally.faults == ["e#0: layer 0 of block 2 holds wrong bytes after job 1"]


def test_failed_blocks_may_hold_anything(rank: Rank) -> None:
    rank.scheduler(PLAN)
    fill(rank, 1, HASHES[0])
    rank.heard(end(1, msg.JobOutcome.FAILED, 2))
    assert rank._setting.tally.faults == []


def test_a_block_written_before_its_gate_is_named(rank: Rank) -> None:
    rank.scheduler(PLAN)
    fill(rank, 2, HASHES[1])
    rank.model(msg.StepBegun(step=1))
    assert rank._setting.tally.faults == [
        "e#0: block 2 of job 1 was written before step 1 had begun"
    ]


def test_a_layer_announced_too_early_is_named(rank: Rank) -> None:
    job = msg.LoadJob(
        job_id=1, request_id="r", group=0, block_ids=(1, 2), block_hashes=HASHES, layerwise=True
    )
    rank.scheduler(msg.StepPlan(step=1, loads=(job,)))
    assert rank.memory is not None
    assert not rank.layers_ready(1, 1)
    rank.memory.page.publish(1, 1, failed=False)
    assert rank.layers_ready(1, 1)
    for block, block_hash in BLOCKS:
        fill(rank, block, block_hash)
    rank.heard(end(1, msg.JobOutcome.DONE))
    assert rank._setting.tally.faults == [
        "e#0: layer 0 of block 1 was announced before its bytes were there",
        "e#0: layer 0 of block 2 was announced before its bytes were there",
    ]


def layerwise(job_id: int = 1) -> msg.StepPlan:
    job = load_job(job_id, 0, BLOCKS)
    return msg.StepPlan(step=1, loads=(msgspec.structs.replace(job, layerwise=True),))


@pytest.mark.parametrize("begun_first", [False, True])
def test_what_is_announced_is_looked_at_although_no_layer_is_computed(
    rank: Rank, begun_first: bool
) -> None:
    if begun_first:
        rank.model(msg.StepBegun(step=1))
        assert not rank.watch()
        rank.scheduler(layerwise())
    else:
        rank.scheduler(layerwise())
        assert not rank.watch()
        rank.model(msg.StepBegun(step=1))
    assert rank.watch()
    assert rank.memory is not None
    rank.memory.page.publish(1, 1, failed=False)
    assert rank.watch()
    for block, block_hash in BLOCKS:
        fill(rank, block, block_hash)
    rank.memory.page.publish(1, NUM_LAYERS, failed=False)
    assert not rank.watch()
    rank.heard(end(1, msg.JobOutcome.DONE))
    assert [one.partition(": ")[2] for one in rank._setting.tally.faults] == [
        "layer 0 of block 1 was announced before its bytes were there",
        "layer 0 of block 2 was announced before its bytes were there",
    ]


@pytest.mark.parametrize("outcome", list(msg.JobOutcome))
@pytest.mark.parametrize("again", [False, True])
def test_a_block_that_is_written_after_its_job_is_named(
    rank: Rank, outcome: msg.JobOutcome, again: bool
) -> None:
    rank.scheduler(PLAN)
    rank.heard(end(1, outcome, 1, 2))
    fill(rank, 2, HASHES[1])
    if again:
        rank.scheduler(msg.StepPlan(step=2, saves=(save_job(2, 0, BLOCKS),)))
    rank.check_released()
    assert rank._setting.tally.faults == ["e#0: block 2 was written after job 1 had ended"]


def test_a_block_of_two_jobs_may_be_written_until_the_second_ends(rank: Rank) -> None:
    rank.scheduler(PLAN)
    rank.scheduler(msg.StepPlan(step=2, loads=(load_job(2, 0, BLOCKS[:1]),)))
    rank.heard(end(1, msg.JobOutcome.FAILED, 1, 2))
    fill(rank, 1, HASHES[0])
    rank.heard(end(2, msg.JobOutcome.DONE))
    rank.check_released()
    assert rank._setting.tally.faults == []


def test_a_save_that_has_ended_gets_no_more_layers_of_ours(rank: Rank) -> None:
    job = msgspec.structs.replace(save_job(1, 0, BLOCKS), computed=False)
    rank.scheduler(msg.StepPlan(step=1, saves=(job,)))
    rank.heard(end(1, msg.JobOutcome.SKIPPED, 1, 2))
    rank.model(msg.LayersComputed(step=1, num_layers=1))
    rank.check_released()
    assert rank._setting.tally.faults == []


def test_bad_plans_of_a_recording_touch_nothing(rank: Rank) -> None:
    bad = load_job(1, 0, [(0, HASHES[0]), (99, HASHES[1])])
    elsewhere = load_job(2, 7, BLOCKS)
    rank.scheduler(msg.StepPlan(step=1, loads=(bad, elsewhere)))
    rank.model(msg.StepBegun(step=1))
    rank.heard(end(1, msg.JobOutcome.DONE))
    rank.heard(end(2, msg.JobOutcome.DONE))
    assert rank._setting.tally.num_checked == 0


def test_what_a_lost_side_would_say_is_not_said(rank: Rank, links: Deaf) -> None:
    rank.lose("model")
    rank.lose("scheduler")
    links.said.clear()
    rank.model(msg.StepBegun(step=1))
    rank.scheduler(PLAN)
    assert links.said == []
