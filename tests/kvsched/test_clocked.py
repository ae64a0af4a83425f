"""What is said about a step goes by the device's clock, and never stops the model's thread."""

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvcommon.ids import EngineId, new_epoch
from kvcommon.memory.clock import DeviceClock
from kvcommon.memory.page import ProgressPage
from kvcommon.messages import EVENTS, CancelJobs, LayersComputed, StepBegun
from kvsched.clocked import ClockedDataLink
from kvsched.link import DaemonLink
from kvsched.model_side import ModelSide
from tests.support.fakedaemon import FakeDaemon
from tests.support.modelside import NAMES, StillAttachment, layerwise, loading


class HandClock(DeviceClock):
    """A device that gets as far as the test lets it."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self.stamps = 0
        self.asked: list[tuple[int, bool]] = []

    def stamp(self) -> int:
        self.stamps += 1
        return self.stamps

    def settle(self, stamp: int, *, shared: bool) -> bytes:
        self.asked.append((stamp, shared))
        assert self.reached.acquire(timeout=20)
        return b"event%d" % stamp if shared else b""

    def bind_thread(self) -> None:
        pass


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as running:
        yield running


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def attachment() -> StillAttachment:
    made = StillAttachment()
    made.capabilities = (EVENTS,)  # type: ignore[assignment]
    return made


@pytest.fixture
def data(
    daemon: FakeDaemon, clock: HandClock, attachment: StillAttachment
) -> Iterator[ClockedDataLink]:
    link = DaemonLink(daemon.context, daemon.endpoint, 0, "data")
    made = ClockedDataLink(link, EngineId("e"), new_epoch(), clock, cast("Any", attachment))
    yield made
    clock.reached.release(100)
    made.close()


def test_nothing_is_said_before_the_device_is_there(
    daemon: FakeDaemon, clock: HandClock, data: ClockedDataLink
) -> None:
    assert data.send(StepBegun(step=3), 1)
    assert data.send(LayersComputed(step=3, num_layers=1), 1)
    assert clock.stamps == 2
    assert daemon.silent()
    clock.reached.release(2)
    assert daemon.hear(StepBegun).event == b"event1"
    assert daemon.hear(LayersComputed).event == b"event2"


def test_without_shared_events_the_message_is_enough(
    daemon: FakeDaemon, clock: HandClock, data: ClockedDataLink, attachment: StillAttachment
) -> None:
    attachment.capabilities = ()
    data.send(StepBegun(step=3), 1)
    clock.reached.release()
    assert daemon.hear(StepBegun).event == b""
    assert clock.asked == [(1, False)]


def test_what_is_not_about_the_device_is_said_at_once(
    daemon: FakeDaemon, data: ClockedDataLink
) -> None:
    assert data.send(CancelJobs(step=3, job_ids=(1,)), 1)
    assert daemon.hear(CancelJobs).job_ids == (1,)


def test_what_was_meant_for_an_earlier_daemon_is_dropped(
    daemon: FakeDaemon, clock: HandClock, data: ClockedDataLink, attachment: StillAttachment
) -> None:
    data.send(StepBegun(step=3), 1)
    attachment.generation = 2
    data.send(StepBegun(step=4), 2)
    clock.reached.release(2)
    assert daemon.hear(StepBegun).step == 4


def test_nobody_attached_means_nothing_is_stamped(clock: HandClock, data: ClockedDataLink) -> None:
    assert not data.send(StepBegun(step=3), 0)
    assert clock.stamps == 0


def test_a_batch_that_does_not_wait_at_its_hooks_is_waited_for_at_bind(
    daemon: FakeDaemon, attachment: StillAttachment
) -> None:
    page = ProgressPage.create()
    link = DaemonLink(daemon.context, daemon.endpoint, 0, "data")
    data = ClockedDataLink(link, EngineId("e"), new_epoch(), HandClock(), cast("Any", attachment))
    data._clock.reached.release(100)  # type: ignore[attr-defined]
    model = ModelSide(cast("Any", attachment), page, data, NAMES, 60_000, hooks_wait=False)
    far_page = ProgressPage.open(page.handle)
    done = threading.Event()

    def load() -> None:
        # Only what bind itself says lets the daemon begin.
        daemon.hear(StepBegun)
        done.set()
        far_page.publish(5, len(NAMES), False)

    thread = threading.Thread(target=load)
    thread.start()
    model.bind(loading(5, layerwise(1, 3)))
    assert done.is_set()
    assert page.read(5) == (len(NAMES), False)
    assert model.failed_blocks() == set()
    thread.join()
    model.clear()
    data.close()
    far_page.close()
    page.close()
