"""The model side's asynchronous loads, and those that the scheduler side has lost."""

from collections.abc import Iterator

import pytest

from kvcommon.memory.page import ProgressPage
from kvcommon.messages import JobEnd, JobOutcome, JobsEnded, StepBegun
from kvsched.core.commands import TellModel
from kvsched.link import DaemonLink
from kvsched.metadata import StepMetadata, step_metadata
from kvsched.model_side import ModelSide
from tests.support.fakedaemon import FakeDaemon
from tests.support.modelside import (
    StillAttachment,
    later,
    layerwise,
    loading,
    model_side,
    run_step,
)


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as running:
        yield running


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    made = ProgressPage.create()
    yield made
    made.close()


@pytest.fixture
def attachment() -> StillAttachment:
    return StillAttachment()


@pytest.fixture
def link(daemon: FakeDaemon) -> Iterator[DaemonLink]:
    made = DaemonLink(daemon.context, daemon.endpoint, 0, "data")
    yield made
    made.close()


@pytest.fixture
def model(attachment: StillAttachment, page: ProgressPage, link: DaemonLink) -> ModelSide:
    """All of whose layers are known to call hooks."""
    made = model_side(attachment, page, link)
    run_step(made, StepMetadata(1))
    return made


def test_an_asynchronous_load_is_reported_once_with_its_failed_blocks(
    daemon: FakeDaemon, model: ModelSide
) -> None:
    model.bind(loading(5, later(1, 3, 4)))
    daemon.hear(StepBegun)
    model.clear()
    assert run_step(model, StepMetadata(6)) == (set(), set(), False)
    end = JobEnd(job_id=1, outcome=JobOutcome.FAILED, failed_blocks=(4,))
    daemon.say("data", JobsEnded(ends=(end,)))
    model._data.drain(20_000)
    assert run_step(model, StepMetadata(7)) == ({"r1"}, {4}, True)
    assert run_step(model, StepMetadata(8)) == (set(), set(), False)


def test_after_its_daemon_has_died_an_asynchronous_load_has_failed_once(
    model: ModelSide, attachment: StillAttachment
) -> None:
    assert run_step(model, loading(5, later(1, 3, 4))) == (set(), set(), True)
    attachment.attached = False
    assert run_step(model, StepMetadata(6)) == ({"r1"}, {3, 4}, True)
    attachment.attached = True
    attachment.generation += 1
    assert run_step(model, StepMetadata(7)) == (set(), set(), False)


def test_a_daemon_that_came_back_does_not_know_the_loads_of_the_last(
    model: ModelSide, attachment: StillAttachment
) -> None:
    run_step(model, loading(5, later(1, 3)))
    attachment.generation += 1
    assert run_step(model, StepMetadata(6)) == ({"r1"}, {3}, True)


@pytest.mark.parametrize("serving", [0, 1])
def test_loads_that_the_scheduler_side_lost_have_failed_at_once(
    daemon: FakeDaemon, model: ModelSide, attachment: StillAttachment, serving: int
) -> None:
    attachment.attached = serving > 0
    tell = TellModel(step=5, loads=(layerwise(-1, 3, 4), later(-2, 9)))
    assert run_step(model, step_metadata(tell, lost=True)) == ({"r-2"}, {3, 4, 9}, True)
    # The gate stays shut: a daemon that was told of them must not begin.
    assert daemon.silent()
