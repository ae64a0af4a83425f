"""The scheduler side's shell between vLLM's calls and a daemon of the test's own."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import zmq
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from kvcommon.config import ConnectorConfig
from kvcommon.ids import EngineId
from kvcommon.messages import (
    GroupHit,
    Hello,
    JobEnd,
    JobOutcome,
    JobsEnded,
    Lookup,
    LookupResult,
    ResetStore,
    StepPlan,
    StepVerdict,
)
from kvsched.core.core import CoreConfig
from kvsched.core.events import RequestAdded
from kvsched.metadata import StepMetadata, read_step_metadata
from kvsched.ranks import RankInfo
from kvsched.shell import SchedulerShell
from tests.support.fakedaemon import FakeDaemon, until

BLOCK = 16
NUM_BLOCKS = 64
LONG_MS = 20_000.0


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as running:
        monkeypatch.setattr(zmq.Context, "instance", lambda: running.context)
        yield running


class World:
    """A shell whose daemon has welcomed it, with vLLM's own block pool."""

    def __init__(self, daemon: FakeDaemon, *, load: str = "layerwise", **options: Any) -> None:
        self.daemon = daemon
        config = ConnectorConfig(**{"lookup_wait_ms": LONG_MS, "validate": True, **options})
        core = CoreConfig(
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
            load=load,  # type: ignore[arg-type]
            lookup_timeout_ms=LONG_MS,
            validate=True,
        )
        self.shell = SchedulerShell(config, EngineId("engine"), core)
        self.pool = BlockPool(num_gpu_blocks=NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.shell.bind_block_pool(self.pool)

    def greet(self, event_log: str = "") -> None:
        info = RankInfo(
            rank=0,
            endpoint=self.daemon.endpoint,
            device="cpu:0",
            fingerprint="f",
            object_bytes=64,
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
        )
        self.shell.ranks_known([info])
        self.daemon.hear(Hello)
        self.daemon.welcome(event_log=event_log)
        self.poll_until(lambda: self.shell._core.serving)

    def poll_until(self, condition: Any) -> None:
        def met() -> bool:
            self.shell._poll()
            return bool(condition())

        ranks = self.shell._ranks
        assert ranks is not None
        until(met, lambda timeout_ms: ranks.wait(0, timeout_ms))

    def answer(self, num_blocks: int) -> None:
        """Answer the next lookup."""
        lookup = self.daemon.hear(Lookup)
        hits = (GroupHit(group=0, num_blocks=num_blocks),)
        self.daemon.say("scheduler", LookupResult(lookup_id=lookup.lookup_id, hits=hits))

    def admit(self, request: Any, num_blocks: int) -> tuple[list[Any], Any]:
        """Look a request up, find everything but its last block, and admit it with that."""
        self.shell.request_added(request)
        self.answer(num_blocks - 1)
        matched, _ = self.shell.match(request, 0)
        assert matched == (num_blocks - 1) * BLOCK
        blocks = self.pool.get_new_blocks(num_blocks)
        ids = [block.block_id for block in blocks]
        self.shell.allocated(request, ids, matched)
        return blocks, scheduled(request, ids, matched)


@pytest.fixture
def world(daemon: FakeDaemon) -> Iterator[World]:
    made = World(daemon)
    made.greet()
    yield made
    made.shell.close()


def request(name: str, num_blocks: int = 3) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_tokens=num_blocks * BLOCK,
        block_hashes=[f"{name}{index}".encode() for index in range(num_blocks)],
    )


def scheduled(request: Any, ids: list[int], computed: int) -> SchedulerOutput:
    """The step in which a request is computed to its end."""
    output = SchedulerOutput.make_empty()
    fresh = NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=[],
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=(ids,),
        num_computed_tokens=computed,
        lora_request=None,
    )
    output.scheduled_new_reqs = [fresh]
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    output.num_scheduled_tokens = {request.request_id: request.num_tokens - computed}
    return output


def nothing() -> SchedulerOutput:
    return SchedulerOutput.make_empty()


def explode(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("the dog ate it")


# -- one request -----------------------------------------------------------------------------------


def test_a_request_is_looked_up_loaded_saved_and_published(world: World) -> None:
    daemon, shell = world.daemon, world.shell
    wanted = request("r")
    free = world.pool.get_num_free_blocks()
    blocks, step = world.admit(wanted, 3)
    metadata = shell.plan(step)
    assert metadata.step == 1
    tell = read_step_metadata(metadata)
    ids = tuple(block.block_id for block in blocks)
    assert [load.block_ids for load in tell.loads] == [ids[:2]]
    assert tell.saves
    plan = daemon.hear(StepPlan)
    assert plan.loads[0].block_hashes == (b"r0", b"r1")
    assert [job.block_ids for job in plan.saves] == [ids[2:]]
    # What is said has a cause in the log.
    assert daemon.envelope is not None
    assert daemon.envelope.cause.startswith("kvsched-engine-")
    # Held for the jobs, whatever becomes of the request.
    shell.request_finished("r")
    world.pool.free_blocks(blocks)
    assert world.pool.get_num_free_blocks() == free - 3
    assert shell.has_pending
    shell.step_finished(1, ())
    assert daemon.hear(StepVerdict).tainted == ()
    jobs = [plan.loads[0].job_id, *(job.job_id for job in plan.saves)]
    ends = tuple(JobEnd(job_id=job, outcome=JobOutcome.DONE) for job in jobs)
    daemon.say("scheduler", JobsEnded(ends=ends))
    world.poll_until(lambda: not shell.has_pending)
    assert world.pool.get_num_free_blocks() == free
    assert shell.counters["hit_tokens"] == 2 * BLOCK


def test_a_failed_block_taints_the_saves_of_its_request(world: World) -> None:
    blocks, step = world.admit(request("r"), 3)
    world.shell.plan(step)
    plan = world.daemon.hear(StepPlan)
    world.shell.step_finished(1, {blocks[1].block_id})
    assert world.daemon.hear(StepVerdict).tainted == (plan.saves[0].job_id,)


def test_steps_are_numbered_and_an_idle_one_carries_nothing(world: World) -> None:
    assert world.shell.plan(nothing()) == StepMetadata(1)
    assert world.shell.plan(nothing()) == StepMetadata(2)
    assert world.daemon.silent()


def test_a_request_that_was_never_announced_is_looked_up_when_asked(world: World) -> None:
    wanted = request("r")
    world.shell._wait_left_ns = 0
    assert world.shell.match(wanted, 0) == (None, False)
    world.answer(2)
    world.shell.plan(nothing())
    assert world.shell.match(wanted, 0) == (2 * BLOCK, False)


def test_a_request_that_grew_is_looked_up_with_all_it_has(world: World) -> None:
    wanted = request("r", 2)
    world.shell.request_added(wanted)
    world.answer(0)
    wanted.num_tokens += 2 * BLOCK
    wanted.block_hashes += [b"r2", b"r3"]
    world.shell._wait_left_ns = 0
    world.shell.match(wanted, 0)
    assert world.shell._told["r"] == 4
    hashes = world.shell._core._state.requests["r"].hashes
    assert list(hashes) == [b"r0", b"r1", b"r2", b"r3"]


def test_the_store_can_be_reset(world: World) -> None:
    assert world.shell.reset()
    world.daemon.hear(ResetStore)


def test_without_a_daemon_the_engine_serves_without_the_cache(daemon: FakeDaemon) -> None:
    world = World(daemon)
    wanted = request("r")
    world.shell.request_added(wanted)
    assert world.shell.match(wanted, 0) == (0, False)
    blocks = world.pool.get_new_blocks(3)
    ids = [block.block_id for block in blocks]
    world.shell.allocated(wanted, ids, 0)
    assert world.shell.plan(scheduled(wanted, ids, 0)) == StepMetadata(1)
    assert not world.shell.has_pending
    world.shell.close()


# -- lookups are bounded ---------------------------------------------------------------------------


def test_all_lookups_of_a_step_share_one_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon never answers; each wait takes 60 of the 100 ms there are."""
    clock = SimpleNamespace(now_ns=10**15, waits=[])
    stopped = SimpleNamespace(monotonic_ns=lambda: clock.now_ns)
    monkeypatch.setattr("kvsched.shell.time", stopped)

    def wait(_: int, timeout_ms: float) -> bool:
        clock.waits.append(round(timeout_ms))
        clock.now_ns += int(min(timeout_ms, 60) * 1e6)
        return len(clock.waits) % 2 == 1

    assert world.shell._ranks is not None
    monkeypatch.setattr(world.shell._ranks, "wait", wait)
    world.shell._wait_left_ns = 100_000_000
    first, second, third = request("a"), request("b"), request("c")
    assert world.shell.match(first, 0) == (None, False)
    # Something else was heard, so it waited again for what was left.
    assert clock.waits == [100, 40]
    assert world.shell.match(second, 0) == (None, False)
    assert world.shell.match(third, 0) == (None, False)
    assert clock.waits == [100, 40]
    # A new step has its own time.
    world.shell.plan(nothing())
    assert world.shell.match(second, 0) == (None, False)
    assert len(clock.waits) == 4


def test_a_wait_ends_with_the_answer(world: World) -> None:
    """There are twenty seconds to wait, and the answer is there already."""
    wanted = request("r")
    world.shell.request_added(wanted)
    world.answer(2)
    assert world.shell.match(wanted, 0) == (2 * BLOCK, False)
    assert world.shell.match(wanted, 2 * BLOCK) == (0, False)


# -- faults ----------------------------------------------------------------------------------------


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
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    world.shell.request_added(request("r"))
    monkeypatch.setattr(world.shell._core, "handle", explode)
    monkeypatch.setattr(world.shell._log._recorder, "_core", SimpleNamespace(handle=explode))
    call(world.shell)
    assert_off(world.shell, caplog)


def test_a_fault_of_the_shell_does_the_same(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
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
    world = World(daemon, event_log=str(tmp_path))
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
    world = World(daemon, load=load)
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


def test_a_load_that_is_planned_is_not_lost(world: World) -> None:
    _, step = world.admit(request("r"), 3)
    assert not world.shell.plan(step).lost
    world.shell.switch_off("a test", RuntimeError())
    assert world.shell.plan(nothing()) == StepMetadata(2)


# -- the log ---------------------------------------------------------------------------------------


def test_logs_beside_its_daemon(daemon: FakeDaemon, tmp_path: Path) -> None:
    world = World(daemon)
    world.greet(event_log=str(tmp_path))
    world.shell.plan(nothing())
    (log,) = tmp_path.iterdir()
    # From the beginning: the ranks came before the welcome that named the place.
    assert b"RanksKnown" in log.read_bytes()
    world.shell.close()


def test_a_place_that_cannot_be_written_to_is_no_reason_to_stop(
    daemon: FakeDaemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="vllm.kvferry.scheduler")
    (tmp_path / "file").write_text("in the way")
    world = World(daemon)
    world.greet(event_log=str(tmp_path / "file" / "log"))
    assert not world.shell.off
    assert "no event log beside the daemon's" in caplog.text
    world.shell.close()


def test_an_event_of_every_call_is_recorded(world: World) -> None:
    seq = world.shell._log._recorder.seq
    world.shell.request_added(request("r"))
    assert world.shell._log._recorder.seq == seq + 1
    (record,) = [each for each in world.shell._log._waiting._waiting or () if each[0] == seq + 1]
    assert isinstance(record[2], RequestAdded)
