"""The scheduler side's shell between vLLM's calls and a daemon of the test's own."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from kvcommon.messages import (
    Hello,
    JobEnd,
    JobOutcome,
    JobsEnded,
    ResetStore,
    StepPlan,
    StepVerdict,
)
from kvsched.core.events import RequestAdded
from kvsched.metadata import StepMetadata, read_step_metadata
from tests.support.fakedaemon import FakeDaemon, until
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


# -- one request -----------------------------------------------------------------------------------


def test_a_request_is_looked_up_loaded_saved_and_published(world: ShellWorld) -> None:
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


def test_a_failed_block_taints_the_saves_of_its_request(world: ShellWorld) -> None:
    blocks, step = world.admit(request("r"), 3)
    world.shell.plan(step)
    plan = world.daemon.hear(StepPlan)
    world.shell.step_finished(1, {blocks[1].block_id})
    assert world.daemon.hear(StepVerdict).tainted == (plan.saves[0].job_id,)


def test_steps_are_numbered_and_an_idle_one_carries_nothing(world: ShellWorld) -> None:
    assert world.shell.plan(nothing()) == StepMetadata(1)
    assert world.shell.plan(nothing()) == StepMetadata(2)
    assert world.daemon.silent()


def test_a_request_that_was_never_announced_is_looked_up_when_asked(world: ShellWorld) -> None:
    wanted = request("r")
    world.shell._wait_left_ns = 0
    assert world.shell.match(wanted, 0) == (None, False)
    world.answer(2)
    world.shell.plan(nothing())
    assert world.shell.match(wanted, 0) == (2 * BLOCK, False)


def test_a_request_that_grew_is_looked_up_with_all_it_has(world: ShellWorld) -> None:
    wanted = request("r", 2)
    world.shell.request_added(wanted)
    world.answer(0)
    wanted.num_tokens += 2 * BLOCK
    wanted.block_hashes += [b"r2", b"r3"]
    world.shell._wait_left_ns = 0
    world.shell.match(wanted, 0)
    assert world.shell._questions.told["r"] == 4
    hashes = world.shell._core._state.requests["r"].hashes
    assert list(hashes) == [b"r0", b"r1", b"r2", b"r3"]


def test_the_store_can_be_reset(world: ShellWorld) -> None:
    assert world.shell.reset()
    world.daemon.hear(ResetStore)


def test_a_starved_daemon_has_less_time_while_it_loads(world: ShellWorld) -> None:
    ranks = world.shell._ranks
    assert ranks is not None
    assert ranks._patience_ns(0) == 16_000_000_000
    _, step = world.admit(request("r"), 3)
    world.shell.plan(step)
    assert ranks._patience_ns(0) == 1_600_000_000


def test_a_reset_of_which_no_daemon_hears_is_not_done_yet(
    daemon: FakeDaemon, world: ShellWorld, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = ShellWorld(daemon)
    assert not unknown.shell.reset()
    assert "the daemons are not known yet" in caplog.text
    unknown.shell.close()
    daemon.stop()
    world.poll_until(lambda: not world.shell._core.serving)
    assert not world.shell.reset()
    assert "ranks [0] cannot be told now" in caplog.text
    # It is made up for, before the daemon serves.
    daemon.start()
    world.poll_until(lambda: isinstance(daemon.hear_anything(0), Hello))
    daemon.welcome()
    world.poll_until(lambda: world.shell._core.serving)
    daemon.hear(ResetStore)
    assert world.shell.reset()


def test_without_a_daemon_the_engine_serves_without_the_cache(daemon: FakeDaemon) -> None:
    world = ShellWorld(daemon)
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
    world: ShellWorld, monkeypatch: pytest.MonkeyPatch
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


def test_the_first_request_after_a_restart_that_nobody_saw_is_looked_up(
    world: ShellWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, ranks = world.daemon, world.shell._ranks
    assert ranks is not None
    (rank,) = ranks._ranks
    rank.watch._gone = True
    # Long ago, as a conversation's beginning goes.
    rank.opened_at = 0
    daemon.stop()
    daemon.start()
    # The engine, which is idle, looks only after the connection has ended.
    until(lambda: rank.link.wait(0), rank.link.wait)
    waits: list[float] = []

    def wait(_: int, timeout_ms: float) -> bool:
        if not waits:
            daemon.hear(Hello)
            daemon.welcome()
        waits.append(timeout_ms)
        return rank.link.wait(timeout_ms)

    monkeypatch.setattr(ranks, "wait", wait)
    world.shell.request_added(request("r"))
    assert waits
    world.answer(2)
    assert world.shell.match(request("r"), 0) == (2 * BLOCK, False)


def test_a_wait_ends_with_the_answer(world: ShellWorld) -> None:
    """There are twenty seconds to wait, and the answer is there already."""
    wanted = request("r")
    world.shell.request_added(wanted)
    world.answer(2)
    assert world.shell.match(wanted, 0) == (2 * BLOCK, False)
    assert world.shell.match(wanted, 2 * BLOCK) == (0, False)


# -- the log ---------------------------------------------------------------------------------------


def test_logs_beside_its_daemon(daemon: FakeDaemon, tmp_path: Path) -> None:
    world = ShellWorld(daemon)
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
    world = ShellWorld(daemon)
    world.greet(event_log=str(tmp_path / "file" / "log"))
    assert not world.shell.off
    assert "no event log beside the daemon's" in caplog.text
    world.shell.close()


def test_an_event_of_every_call_is_recorded(world: ShellWorld) -> None:
    seq = world.shell._log._recorder.seq
    world.shell.request_added(request("r"))
    assert world.shell._log._recorder.seq == seq + 1
    (record,) = [each for each in world.shell._log._waiting._waiting or () if each[0] == seq + 1]
    assert isinstance(record[2], RequestAdded)
