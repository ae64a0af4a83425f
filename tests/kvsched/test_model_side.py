"""The model side: hooks that wait, bounded, and never raise; steps that cost nothing."""

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from kvcommon.memory.page import ProgressPage
from kvcommon.messages import (
    CancelJobs,
    JobEnd,
    JobOutcome,
    JobsEnded,
    LayersComputed,
    Refused,
    StepBegun,
)
from kvsched.core.commands import TellModel
from kvsched.link import DaemonLink
from kvsched.metadata import StepMetadata, step_metadata
from kvsched.model_side import ModelSide
from tests.support.daemonproc import environment
from tests.support.fakedaemon import FakeDaemon
from tests.support.modelside import (
    NAMES,
    StillAttachment,
    later,
    layerwise,
    loading,
    model_side,
    run_step,
    saving,
)

IDLE = StepMetadata(1)
ALL = len(NAMES)


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
    run_step(made, IDLE)
    return made


def impatient(attachment: StillAttachment, page: ProgressPage, link: DaemonLink) -> ModelSide:
    """Whose loads are past their deadline as soon as it looks at the clock."""
    made = model_side(attachment, page, link, load_timeout_ms=0)
    run_step(made, IDLE)
    return made


# -- nothing to do ---------------------------------------------------------------------------------


def test_an_idle_step_makes_no_system_call_and_a_saving_one_does() -> None:
    program = [sys.executable, "-m", "tests.support.sealed_steps", "idle", "save"]
    answer = subprocess.run(program, env=environment(), capture_output=True, check=True)
    found = json.loads(answer.stdout)
    if found["idle"]["said"].startswith("unavailable"):
        pytest.skip(f"no seccomp here: {found['idle']['said']}")
    assert found["idle"]["said"] == "begun ok"
    # The control: what is said to a daemon takes system calls, and the kernel would have seen them.
    assert found["save"] == {"said": "begun ", "status": signal.SIGKILL}


def test_an_idle_step_says_nothing(daemon: FakeDaemon, model: ModelSide, link: DaemonLink) -> None:
    assert run_step(model, IDLE) == (set(), set(), False)
    assert link._socket is None
    assert daemon.silent()


# -- saves -----------------------------------------------------------------------------------------


def test_a_step_with_saves_says_how_far_it_is(daemon: FakeDaemon, model: ModelSide) -> None:
    assert run_step(model, saving(5)) == (set(), set(), True)
    assert daemon.hear(StepBegun).step == 5
    for number in range(1, ALL + 1):
        assert daemon.hear(LayersComputed) == LayersComputed(step=5, num_layers=number)
    assert daemon.silent()
    assert run_step(model, StepMetadata(6)) == (set(), set(), False)
    assert daemon.silent()


def test_layers_without_a_hook_are_computed_when_the_step_is(
    daemon: FakeDaemon, model: ModelSide
) -> None:
    run_step(model, saving(5), names=("layer0", "unknown", "layer2"))
    daemon.hear(StepBegun)
    assert daemon.hear(LayersComputed).num_layers == 1
    assert daemon.hear(LayersComputed).num_layers == ALL
    assert daemon.silent()


def test_layers_out_of_order_are_said_in_order(daemon: FakeDaemon, model: ModelSide) -> None:
    run_step(model, saving(5), names=("layer1", "layer0", "layer3", "layer2"))
    daemon.hear(StepBegun)
    assert daemon.hear(LayersComputed).num_layers == 2
    assert daemon.hear(LayersComputed).num_layers == ALL
    assert daemon.silent()


def test_a_step_that_only_loads_does_not_say_what_it_computes(
    daemon: FakeDaemon, model: ModelSide, page: ProgressPage
) -> None:
    page.publish(5, ALL, False)
    run_step(model, loading(5, layerwise(1, 3)))
    daemon.hear(StepBegun)
    assert daemon.silent()


def test_jobs_to_cancel_are_said_before_the_step_begins(
    daemon: FakeDaemon, model: ModelSide
) -> None:
    run_step(model, step_metadata(TellModel(step=5, saves=True, cancel=(8, 9))))
    assert daemon.hear(CancelJobs).job_ids == (8, 9)
    daemon.hear(StepBegun)


def test_a_cancellation_alone_does_not_begin_a_step(daemon: FakeDaemon, model: ModelSide) -> None:
    assert run_step(model, step_metadata(TellModel(step=5, cancel=(8,)))) == (set(), set(), True)
    daemon.hear(CancelJobs)
    assert daemon.silent()


# -- layerwise loads -------------------------------------------------------------------------------


def test_each_layer_waits_for_itself_while_later_ones_are_in_flight(
    model: ModelSide, page: ProgressPage
) -> None:
    """The writer publishes layer n+1 only after the reader has got through layer n."""
    passed = [threading.Event() for _ in NAMES]
    far_page = ProgressPage.open(page.handle)

    def write() -> None:
        for index in range(ALL):
            far_page.publish(5, index + 1, False)
            passed[index].wait()

    writer = threading.Thread(target=write)
    writer.start()
    model.bind(loading(5, layerwise(1, 3, 4)))
    model.start_load()
    for index, name in enumerate(NAMES):
        model.wait_for_layer(name)
        assert page.read(5) == (index + 1, False)
        passed[index].set()
    writer.join()
    assert model.failed_blocks() == set()
    model.clear()
    far_page.close()


def test_before_the_hooks_are_known_the_forward_pass_waits_for_everything(
    attachment: StillAttachment, page: ProgressPage, link: DaemonLink
) -> None:
    model = model_side(attachment, page, link)
    asked: list[int] = []

    class Slow:
        """The page, on which each look finds one more layer."""

        def read(self, step: int) -> tuple[int, bool]:
            asked.append(step)
            return min(len(asked), ALL), False

    model._page = Slow()  # type: ignore[assignment]
    model.bind(loading(5, layerwise(1, 3)))
    model.start_load()
    assert len(asked) == ALL
    model.wait_for_layer(NAMES[0])
    assert len(asked) == ALL


def test_layers_that_never_call_a_hook_are_waited_for_at_the_first_one(
    attachment: StillAttachment, page: ProgressPage, link: DaemonLink
) -> None:
    model = model_side(attachment, page, link, load_timeout_ms=0)
    hooked = ("layer0", "layer1", "layer3")
    run_step(model, IDLE, hooked)
    # Two layers are there: enough for layer0, not for the silent layer2.
    page.publish(5, 2, False)
    assert run_step(model, loading(5, layerwise(1, 7)), hooked) == (set(), {7}, True)
    # Three are enough for layer0 and layer1, not for layer3.
    page.publish(6, 3, False)
    model.bind(loading(6, layerwise(2, 8)))
    model.wait_for_layer("layer0")
    model.wait_for_layer("layer1")
    assert model._loads
    model.wait_for_layer("layer3")
    assert model.failed_blocks() == {8}
    model.clear()


def test_past_the_deadline_all_loads_of_the_step_have_failed_and_nothing_waits(
    attachment: StillAttachment, page: ProgressPage, link: DaemonLink
) -> None:
    model = impatient(attachment, page, link)
    page.publish(5, 1, False)
    model.bind(loading(5, layerwise(1, 3, 4), layerwise(2, 9)))
    model.wait_for_layer(NAMES[0])
    model.wait_for_layer(NAMES[1])

    class Unreadable:
        """Nobody looks at the page any more."""

    model._page = Unreadable()  # type: ignore[assignment]
    model.wait_for_layer(NAMES[2])
    model.wait_for_layer(NAMES[3])
    assert model.failed_blocks() == {3, 4, 9}
    assert model.failed_blocks() == set()
    assert model.report(5) is not None
    model.clear()


@pytest.mark.parametrize("how", ["gone", "replaced"])
def test_without_its_daemon_a_load_has_failed_at_once(
    model: ModelSide, attachment: StillAttachment, page: ProgressPage, how: str
) -> None:
    """The deadline is a minute away."""
    page.publish(5, 1, False)
    model.bind(loading(5, layerwise(1, 3, 4)))
    model.wait_for_layer(NAMES[0])
    if how == "gone":
        attachment.attached = False
    else:
        attachment.generation += 1
    model.wait_for_layer(NAMES[1])
    assert model.failed_blocks() == {3, 4}


def test_a_load_that_was_planned_before_we_attached_fails_at_once(
    daemon: FakeDaemon, model: ModelSide, attachment: StillAttachment
) -> None:
    attachment.attached = False
    assert run_step(model, loading(5, layerwise(1, 3), saves=True)) == (set(), {3}, True)
    assert daemon.silent()


def test_the_daemon_may_end_the_load_before_it_dies(
    model: ModelSide, attachment: StillAttachment, page: ProgressPage
) -> None:
    page.publish(5, ALL, False)
    attachment.attached = False
    assert run_step(model, loading(5, layerwise(1, 3)))[1] == set()


def test_failed_blocks_are_those_that_the_daemon_names(
    daemon: FakeDaemon, model: ModelSide, page: ProgressPage
) -> None:
    model.bind(loading(5, layerwise(1, 3, 4), layerwise(2, 9)))
    daemon.hear(StepBegun)
    ends = (
        JobEnd(job_id=1, outcome=JobOutcome.FAILED, failed_blocks=(4,)),
        JobEnd(job_id=2, outcome=JobOutcome.DONE),
    )
    daemon.say("data", JobsEnded(ends=ends))
    page.publish(5, ALL, True)
    for name in NAMES:
        model.wait_for_layer(name)
    assert model.failed_blocks() == {4}


def test_of_a_job_that_is_not_named_every_block_counts(
    daemon: FakeDaemon, model: ModelSide, page: ProgressPage
) -> None:
    model.bind(loading(5, layerwise(1, 3, 4), layerwise(2, 9, 10)))
    daemon.hear(StepBegun)
    end = JobEnd(job_id=1, outcome=JobOutcome.FAILED, failed_blocks=(4,))
    daemon.say("data", JobsEnded(ends=(end,)))
    # Nothing more can come in this conversation.
    daemon.say("data", Refused(reason="who?", resync=True))
    page.publish(5, ALL, True)
    for name in NAMES:
        model.wait_for_layer(name)
    assert model.failed_blocks() == {4, 9, 10}


def test_a_silent_daemon_is_not_waited_for_beyond_its_time(
    daemon: FakeDaemon,
    model: ModelSide,
    page: ProgressPage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvsched.model_side._FAILURE_REPORT_MS", 0.0)
    page.publish(5, ALL, True)
    assert run_step(model, loading(5, layerwise(1, 3)))[1] == {3}


def test_a_forward_pass_that_calls_no_hook_has_read_too_early(
    model: ModelSide, page: ProgressPage, caplog: pytest.LogCaptureFixture
) -> None:
    page.publish(5, ALL, False)
    assert run_step(model, loading(5, layerwise(1, 3, 4)), names=()) == (set(), {3, 4}, True)
    assert "no layer called vLLM's hooks" in caplog.text
    # From now on the forward pass does not begin before everything is there.
    page.publish(6, ALL, False)
    assert run_step(model, loading(6, layerwise(2, 5)), names=()) == (set(), set(), True)


def test_nothing_of_a_step_is_left_for_the_next(
    attachment: StillAttachment, page: ProgressPage, link: DaemonLink
) -> None:
    model = impatient(attachment, page, link)
    assert run_step(model, loading(5, layerwise(1, 3), saves=True))[1] == {3}
    assert run_step(model, StepMetadata(6)) == (set(), set(), False)
    page.publish(7, ALL, False)
    assert run_step(model, loading(7, layerwise(2, 4))) == (set(), set(), True)


# -- whatever happens ------------------------------------------------------------------------------


def test_hooks_may_come_in_any_order_and_never_raise(
    daemon: FakeDaemon, attachment: StillAttachment, page: ProgressPage, link: DaemonLink
) -> None:
    random_ = random.Random(5)
    model = impatient(attachment, page, link)
    steps = [
        IDLE,
        saving(2),
        loading(3, layerwise(1, 3), later(2, 4)),
        step_metadata(TellModel(step=4, cancel=(2,))),
        step_metadata(TellModel(step=5, loads=(later(-1, 3),)), lost=True),
    ]
    hooks: list[Callable[[], object]] = [
        lambda: model.bind(random_.choice(steps)),
        model.start_load,
        lambda: model.wait_for_layer(random_.choice([*NAMES, "", "draft"])),
        lambda: model.layer_computed(random_.choice([*NAMES, "", "draft"])),
        model.step_computed,
        model.finished_loads,
        model.failed_blocks,
        lambda: model.report(3),
        model.clear,
        lambda: setattr(attachment, "attached", random_.random() < 0.8),
        lambda: setattr(attachment, "generation", attachment.generation + 1),
        lambda: page.publish(3, random_.randrange(ALL + 1), random_.random() < 0.5),
        lambda: daemon.hear_anything(0),
    ]
    for _ in range(3_000):
        random_.choice(hooks)()
        if daemon.peers and random_.random() < 0.1:
            daemon.say_frame("data", b"nonsense")
            daemon.say("data", Refused(reason="who?", resync=True))


def test_closing_lets_go_of_everything(
    daemon: FakeDaemon, attachment: StillAttachment, link: DaemonLink
) -> None:
    page = ProgressPage.create()
    model = model_side(attachment, page, link)
    run_step(model, saving(1))
    assert model.describe() == {"attached": True, "layers": ALL}
    model.close()
    assert not attachment.attached
    assert link._socket is None
    with pytest.raises(ValueError, match="released"):
        page.read(1)
