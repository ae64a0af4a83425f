"""A bug of ours switches the scheduler side off; vLLM never sees an exception or a wrong block."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import zmq

from kvsched.metadata import StepMetadata, read_step_metadata
from kvsched.shell import SchedulerShell
from tests.support.fakedaemon import FakeDaemon
from tests.support.shellworld import BLOCK, ShellWorld, nothing, request, scheduled


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as running:
        monkeypatch.setattr(zmq.Context, "instance", lambda: running.context)
        yield running


@pytest.fixture
def world(daemon: FakeDaemon) -> Iterator[ShellWorld]:
    made = ShellWorld(daemon)
    made.greet()
    yield made
    made.shell.close()


def explode(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("the dog ate it")


def assert_off(shell: SchedulerShell, caplog: pytest.LogCaptureFixture) -> None:
    assert shell.off
    assert "serves on without the cache until it is restarted" in caplog.text
    assert "Please report it" in caplog.text
    assert "the dog ate it" in caplog.text
    wanted = request("later")
    shell.request_added(wanted)
    assert shell.match(wanted, 0) == (0, False)
    shell.allocated(wanted, (5, 6, 7), 0)
    step = shell._step
    assert shell.plan(scheduled(wanted, [5, 6, 7], 0)) == StepMetadata(step + 1)
    shell.step_finished(step, {5})
    shell.request_finished("later")
    assert shell.reset() is False
    assert shell.has_pending is False
    assert shell.counters is not None


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda shell: shell.request_added(request("x")), id="request_added"),
        pytest.param(lambda shell: shell.match(request("x"), 0), id="match"),
        pytest.param(lambda shell: shell.allocated(request("x"), (1,), 0), id="allocated"),
        pytest.param(lambda shell: shell.plan(scheduled(request("r"), [1], 0)), id="plan"),
        pytest.param(lambda shell: shell.step_finished(1, ()), id="step_finished"),
        pytest.param(lambda shell: shell.request_finished("r"), id="request_finished"),
        pytest.param(lambda shell: shell.reset(), id="reset"),
        pytest.param(lambda shell: shell.ranks_known([]), id="ranks_known"),
    ],
)
def test_a_fault_of_the_core_switches_off_and_never_reaches_vllm(
    world: ShellWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    world.shell.request_added(request("r"))
    monkeypatch.setattr(world.shell._core, "handle", explode)
    monkeypatch.setattr(world.shell._log._recorder, "_core", SimpleNamespace(handle=explode))
    call(world.shell)
    assert_off(world.shell, caplog)


def test_a_fault_of_the_shell_does_the_same(
    world: ShellWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.shell._ranks, "poll", explode)
    world.shell.request_added(request("x"))
    assert_off(world.shell, caplog)


def test_the_fault_names_the_log_and_ends_it(
    daemon: FakeDaemon,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    world = ShellWorld(daemon, event_log=str(tmp_path))
    world.greet()
    monkeypatch.setattr(world.shell._blocks, "hold", explode)
    _, step = world.admit(request("r"), 3)
    world.shell.plan(step)
    assert str(tmp_path) in caplog.text
    files = {path: path.stat().st_size for path in tmp_path.iterdir()}
    assert len(files) == 1
    assert_off(world.shell, caplog)
    # Nothing is written after the story of the fault.
    assert {path: path.stat().st_size for path in tmp_path.iterdir()} == files
    world.shell.close()


@pytest.mark.parametrize("load", ["layerwise", "async"])
@pytest.mark.parametrize("where", ["plan", "allocated"])
def test_a_load_that_vllm_counts_on_is_reported_lost(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, load: str, where: str
) -> None:
    world = ShellWorld(daemon, load=load)
    world.greet()
    wanted = request("r")
    world.shell.request_added(wanted)
    world.answer(2)
    matched, asynchronous = world.shell.match(wanted, 0)
    assert (matched, asynchronous) == (2 * BLOCK, load == "async")
    if where == "allocated":
        monkeypatch.setattr(world.shell._core, "handle", explode)
        monkeypatch.setattr(world.shell._log._recorder, "_core", SimpleNamespace(handle=explode))
    world.shell.allocated(wanted, (7, 8, 9), 2 * BLOCK)
    # The plan may even have reached the daemon: nobody will open its gate.
    monkeypatch.setattr(world.shell, "_do", explode)
    metadata = world.shell.plan(scheduled(wanted, [7, 8, 9], 2 * BLOCK))
    assert world.shell.off
    assert metadata.lost
    (lost,) = read_step_metadata(metadata).loads
    assert (lost.request_id, lost.block_ids) == ("r", (7, 8))
    assert lost.layerwise == (load == "layerwise")
    assert world.shell.plan(nothing()) == StepMetadata(2)
    world.shell.close()


def test_a_load_that_is_planned_is_not_lost(world: ShellWorld) -> None:
    _, step = world.admit(request("r"), 3)
    assert not world.shell.plan(step).lost
    world.shell.switch_off("a test", RuntimeError())
    assert world.shell.plan(nothing()) == StepMetadata(2)
