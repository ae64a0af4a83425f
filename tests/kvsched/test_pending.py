"""The data conversation, and asynchronous loads that end exactly once."""

from collections.abc import Iterator

import pytest

from kvcommon.ids import EngineId, new_epoch
from kvcommon.messages import Heartbeat, JobEnd, JobOutcome, JobsEnded, Refused, StepBegun
from kvsched import pending
from kvsched.core.commands import ModelLoad
from kvsched.link import DaemonLink
from kvsched.pending import AsyncLoads, DataLink
from tests.support.fakedaemon import PATIENCE_MS, FakeDaemon

TIMEOUT_NS = 1_000
SERVING = 4


def end(job_id: int, *failed: int) -> JobEnd:
    outcome = JobOutcome.FAILED if failed else JobOutcome.DONE
    return JobEnd(job_id=job_id, outcome=outcome, failed_blocks=failed)


def load(job_id: int, *block_ids: int, request_id: str = "") -> ModelLoad:
    return ModelLoad(
        job_id=job_id,
        request_id=request_id or f"r{job_id}",
        layerwise=False,
        block_ids=block_ids,
    )


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as running:
        yield running


@pytest.fixture
def data(daemon: FakeDaemon) -> Iterator[DataLink]:
    link = DaemonLink(daemon.context, daemon.endpoint, 0, "data")
    made = DataLink(link, EngineId("e"), new_epoch())
    yield made
    made.close()


def begin(daemon: FakeDaemon, data: DataLink, generation: int = SERVING) -> None:
    assert data.send(StepBegun(step=1), generation)
    assert daemon.hear(StepBegun).step == 1


def test_nothing_is_said_while_nobody_is_attached(daemon: FakeDaemon, data: DataLink) -> None:
    assert not data.send(StepBegun(step=1), 0)
    begin(daemon, data)
    assert daemon.silent()


def test_a_new_attachment_opens_a_new_conversation(daemon: FakeDaemon, data: DataLink) -> None:
    begin(daemon, data, 1)
    first = daemon.peers["data"]
    assert data.send(StepBegun(step=2), 1)
    daemon.hear(StepBegun)
    assert daemon.peers["data"] == first
    assert data.send(StepBegun(step=3), 2)
    daemon.hear(StepBegun)
    assert daemon.peers["data"] != first
    assert daemon.envelope is not None
    assert daemon.envelope.seq == 1


@pytest.mark.parametrize("broken", ["gap", "refused"])
def test_after_a_break_the_next_message_opens_a_conversation(
    daemon: FakeDaemon, data: DataLink, broken: str
) -> None:
    begin(daemon, data)
    first = daemon.peers["data"]
    if broken == "gap":
        daemon.skip("data", Heartbeat())
        daemon.say("data", Heartbeat())
    else:
        daemon.say("data", Refused(reason="who are you?", resync=True))
    data.drain(PATIENCE_MS)
    begin(daemon, data)
    assert daemon.peers["data"] != first


def test_ends_are_taken_once(daemon: FakeDaemon, data: DataLink) -> None:
    begin(daemon, data)
    daemon.say("data", JobsEnded(ends=(end(1), end(2, 7))))
    data.drain(PATIENCE_MS)
    assert data.take(2) == end(2, 7)
    assert data.take(2) is None
    assert data.take(1) == end(1)
    assert data.take(3) is None


def test_ends_that_nobody_asks_for_are_bounded(
    daemon: FakeDaemon, data: DataLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "_MAX_ENDS", 3)
    begin(daemon, data)
    daemon.say("data", JobsEnded(ends=tuple(end(job) for job in range(5))))
    data.drain(PATIENCE_MS)
    assert [job for job in range(5) if data.take(job)] == [2, 3, 4]


def test_waiting_for_several_ends(daemon: FakeDaemon, data: DataLink) -> None:
    begin(daemon, data)
    daemon.say("data", JobsEnded(ends=(end(1),)))
    daemon.say("data", JobsEnded(ends=(end(2, 7),)))
    assert data.wait_for([1, 2], PATIENCE_MS) == {1: end(1), 2: end(2, 7)}
    assert data.wait_for([1], 0) == {}


def test_without_a_conversation_there_is_nothing_to_wait_for(
    daemon: FakeDaemon, data: DataLink
) -> None:
    # Would run into the test's own deadline if it waited.
    hour_ms = 3.6e6
    assert data.wait_for([1], hour_ms) == {}
    begin(daemon, data)
    daemon.say("data", JobsEnded(ends=(end(1),)))
    daemon.say("data", Refused(reason="out of step", resync=True))
    assert data.wait_for([1, 2], hour_ms) == {1: end(1)}


# -- asynchronous loads ----------------------------------------------------------------------------


def test_an_end_that_arrives_ends_its_load_once(daemon: FakeDaemon, data: DataLink) -> None:
    loads = AsyncLoads(TIMEOUT_NS)
    assert not loads
    begin(daemon, data)
    loads.add([load(1, 10, 11), load(2, 12)], 0, SERVING)
    assert len(loads) == 2
    daemon.say("data", JobsEnded(ends=(end(1, 11),)))
    data.drain(PATIENCE_MS)
    assert loads.collect(data, 1, SERVING) == ({"r1"}, {11})
    assert loads.collect(data, 1, SERVING) == (set(), set())
    assert len(loads) == 1


def test_an_end_may_arrive_before_its_load_is_known(daemon: FakeDaemon, data: DataLink) -> None:
    loads = AsyncLoads(TIMEOUT_NS)
    begin(daemon, data)
    daemon.say("data", JobsEnded(ends=(end(1),)))
    data.drain(PATIENCE_MS)
    loads.add([load(1, 10)], 0, SERVING)
    assert loads.collect(data, 1, SERVING) == ({"r1"}, set())


def test_past_its_deadline_a_load_has_failed(daemon: FakeDaemon, data: DataLink) -> None:
    loads = AsyncLoads(TIMEOUT_NS)
    begin(daemon, data)
    loads.add([load(1, 10, 11)], 100, SERVING)
    loads.add([load(2, 12)], 200, SERVING)
    assert loads.collect(data, 99 + TIMEOUT_NS, SERVING) == (set(), set())
    assert loads.collect(data, 100 + TIMEOUT_NS, SERVING) == ({"r1"}, {10, 11})
    assert loads.collect(data, 200 + TIMEOUT_NS, SERVING) == ({"r2"}, {12})
    # Its end comes all the same; nobody asks for it any more.
    daemon.say("data", JobsEnded(ends=(end(1), end(2))))
    data.drain(PATIENCE_MS)
    assert loads.collect(data, 0, SERVING) == (set(), set())


@pytest.mark.parametrize("serving", [0, SERVING + 1])
def test_the_end_of_its_attachment_ends_a_load(
    daemon: FakeDaemon, data: DataLink, serving: int
) -> None:
    loads = AsyncLoads(TIMEOUT_NS)
    begin(daemon, data)
    loads.add([load(1, 10), load(2, 12)], 0, SERVING)
    # What the daemon could still say counts.
    daemon.say("data", JobsEnded(ends=(end(2),)))
    data.drain(PATIENCE_MS)
    assert loads.collect(data, 1, serving) == ({"r1", "r2"}, {10})
    assert not loads


def test_a_load_that_was_planned_under_no_attachment_fails_at_once(data: DataLink) -> None:
    loads = AsyncLoads(TIMEOUT_NS)
    loads.add([load(1, 10)], 0, 0)
    assert loads.collect(data, 1, SERVING) == ({"r1"}, {10})
    loads.add([load(2, 11)], 0, 0)
    assert loads.collect(data, 1, 0) == ({"r2"}, {11})
