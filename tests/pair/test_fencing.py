"""A daemon that freezes while jobs hold blocks: killed, or its blocks are in quarantine."""

import pytest

from kvworker.outcome import Outcome
from tests.pair.daemon import Daemon
from tests.pair.world import World


def frozen_under_load(*, foreign: bool) -> tuple[World, Daemon]:
    """A daemon that has begun to load when it freezes."""
    world = World(load="async")
    world.is_foreign = foreign
    world.store.seed("A", 6)
    for _ in range(5):
        world.tick(300)
        world.deliver_all()
        world.work_all()
    engine, (daemon,) = world.engine, world.daemons
    engine.add("A", 25, 1)
    world.turn()
    world.deliver_all()
    world.work_all()
    world.deliver_all()
    engine.schedule()
    assert engine.held
    daemon.frozen = True
    return world, daemon


def go_on(world: World, seconds: float) -> None:
    """The engine steps as vLLM would: while something is to be done."""
    engine = world.engine
    for _ in range(int(seconds * 4)):
        world.tick(250)
        if engine.ready_to_run() is not None:
            engine.run(wait=True)
        elif engine.steps:
            engine.finish_step()
        elif engine.requests or engine.core.has_pending:
            engine.schedule()


def test_blocks_are_given_back_only_once_the_frozen_daemon_is_dead() -> None:
    world, daemon = frozen_under_load(foreign=False)
    go_on(world, 7)
    early = daemon.alive
    assert early
    assert world.engine.held, "blocks are given back under a daemon that may go on"
    go_on(world, 4)
    assert not daemon.alive
    assert not world.engine.held
    assert world.engine.core.counters["daemons_fenced"] == 1
    # The request was computed meanwhile, and another daemon is welcome.
    go_on(world, 10)
    assert not world.engine.requests
    world.settle()


def test_blocks_of_a_daemon_that_may_not_be_killed_stay_in_quarantine() -> None:
    world, daemon = frozen_under_load(foreign=True)
    go_on(world, 20)
    core = world.engine.core
    assert daemon.alive
    assert world.engine.held
    assert core.num_quarantined_blocks == sum(map(len, world.engine.held.values()))
    assert core.counters["fences_failed"] == 1
    assert not world.engine.requests, "the request was computed"
    assert not core.has_pending, "vLLM would step for ever"
    # It goes on: whatever it still does is on blocks that are held.
    world.settle()
    assert core.num_quarantined_blocks == 0


def test_a_silence_that_nobody_could_have_heard_fences_nobody() -> None:
    world, daemon = frozen_under_load(foreign=False)
    daemon.frozen = False
    world.now_ns += 3_600_000_000_000
    world.engine.poll()
    assert daemon.alive
    world.settle()
    assert "daemons_fenced" not in world.engine.core.counters


@pytest.mark.parametrize("freeze", [0, 1])
def test_the_daemon_of_one_rank_of_two_freezes(freeze: int) -> None:
    world = World(num_ranks=2, load="async")
    for _ in range(5):
        world.tick(300)
        world.deliver_all()
        world.work_all()
    world.engine.add("A", 33, 1)
    go_on(world, 1)
    world.daemons[freeze].frozen = True
    for _ in range(60):
        world.tick(250)
        world.deliver_all()
        for op in world.daemons[1 - freeze].executor.heads():
            world.daemons[1 - freeze].executor.work(op, Outcome.OK)
        go_on(world, 0.25)
    assert not world.daemons[freeze].alive
    assert world.daemons[1 - freeze].alive
    assert not world.engine.held
    world.settle()
