"""Daemons as events of the core: they come, go, restart, refuse, fall silent and die."""

import logging
import os
from collections.abc import Callable, Iterator

import pytest

from kvcommon.ids import EngineId, new_epoch
from kvcommon.messages import (
    GroupHit,
    Heartbeat,
    Hello,
    JobEnd,
    JobOutcome,
    JobsEnded,
    LookupResult,
    PlanAck,
    RankIdentity,
    Refused,
    StepPlan,
    StepVerdict,
    StoreHealth,
    StoreState,
    Welcome,
)
from kvsched.core.events import (
    DaemonLost,
    DaemonReady,
    JobsReported,
    LookupAnswered,
    PlanAcked,
    SchedEvent,
    StoreChanged,
)
from kvsched.link import SEND_HIGH_WATER, ProcessWatch
from kvsched.ranks import RankInfo, Ranks
from tests.support.fakedaemon import FakeDaemon, until

MS = 1_000_000
HEARTBEAT_MS = 500


class Watch(ProcessWatch):
    """A process that lives until the test says otherwise."""

    def __init__(self, pid: int) -> None:
        super().__init__(0)
        self.pid = pid
        self.died = False

    def is_dead(self) -> bool:
        return self.died


class World:
    """Ranks before as many fake daemons, with a clock and processes of the test's own."""

    def __init__(self, daemons: list[FakeDaemon]) -> None:
        self.daemons = daemons
        self.now_ns = 10_000 * MS
        self.open_jobs: dict[int, tuple[int, ...]] = {}
        self.events: list[tuple[SchedEvent, str]] = []
        self.welcomes: list[Welcome] = []
        self.watches: list[Watch] = []
        self.ranks = Ranks(
            daemons[0].context,
            EngineId("engine"),
            new_epoch(),
            [info(rank, daemon.endpoint) for rank, daemon in enumerate(daemons)],
            emit=lambda event, cause: self.events.append((event, cause)),
            open_jobs=lambda rank: self.open_jobs.get(rank, ()),
            heartbeat_ms=HEARTBEAT_MS,
            on_welcome=self.welcomes.append,
            watch=self.watch,
            now_ns=lambda: self.now_ns,
        )

    def watch(self, pid: int) -> Watch:
        made = Watch(pid)
        self.watches.append(made)
        return made

    def poll_until(self, condition: Callable[[], bool], rank: int = 0) -> None:
        """Take things in as they arrive until the condition holds."""

        def met() -> bool:
            self.ranks.poll()
            return condition()

        until(met, lambda timeout_ms: self.ranks.wait(rank, timeout_ms))

    def take(self, number: int, rank: int = 0) -> list[SchedEvent]:
        """The next events, which must be that many."""
        self.poll_until(lambda: len(self.events) >= number, rank)
        taken, self.events = [event for event, _ in self.events], []
        assert len(taken) == number, taken
        return taken

    def hello(self, rank: int = 0) -> Hello:
        """What is said next, while things are taken in."""
        heard: list[object] = []

        def something() -> bool:
            heard.append(self.daemons[rank].hear_anything(0))
            return heard[-1] is not None

        self.poll_until(something, rank)
        assert isinstance(heard[-1], Hello)
        return heard[-1]

    def greet(self, rank: int = 0, *, attached: bool = True, pid: int = 7) -> DaemonReady:
        """Daemon and rank say hello."""
        self.daemons[rank].hear(Hello)
        self.daemons[rank].welcome(attached=attached, pid=pid)
        (event,) = self.take(1, rank)
        assert isinstance(event, DaemonReady)
        return event


def info(rank: int, endpoint: str) -> RankInfo:
    return RankInfo(
        rank=rank,
        endpoint=endpoint,
        device=f"cpu:{rank}",
        fingerprint=f"print{rank}",
        object_bytes=64,
        block_size=16,
        num_blocks=8,
    )


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as running:
        yield running


@pytest.fixture
def world(daemon: FakeDaemon) -> Iterator[World]:
    made = World([daemon])
    yield made
    made.ranks.close()


def lost(event: SchedEvent, *, dead: bool) -> None:
    assert isinstance(event, DaemonLost)
    assert event.dead is dead


def test_says_hello_and_hears_welcome(daemon: FakeDaemon, world: World) -> None:
    hello = daemon.hear(Hello)
    assert hello.pid == os.getpid()
    assert hello.ranks == (RankIdentity(rank=0, fingerprint="print0"),)
    daemon.welcome(attached=False, pid=42, event_log="/logs")
    (event,) = world.take(1)
    assert event == DaemonReady(
        now_ns=world.now_ns, rank=0, epoch=daemon.epoch, attached=False, store="fake"
    )
    assert world.welcomes[0].event_log == "/logs"
    assert [watch.pid for watch in world.watches] == [0, 42]
    daemon.welcome(attached=True, pid=42)
    (event,) = world.take(1)
    assert isinstance(event, DaemonReady)
    assert event.attached
    # The same incarnation is watched already.
    assert len(world.watches) == 2


def test_every_message_is_an_event_with_its_cause(daemon: FakeDaemon, world: World) -> None:
    world.greet()
    result = LookupResult(lookup_id=3, hits=(GroupHit(group=0, num_blocks=2),))
    ends = (JobEnd(job_id=5, outcome=JobOutcome.DONE),)
    daemon.say("scheduler", result, "w:1")
    daemon.say("scheduler", PlanAck(step=8), "w:2")
    daemon.say("scheduler", JobsEnded(ends=ends), "w:3")
    daemon.say("scheduler", StoreHealth(state=StoreState.DOWN, reason="timeouts"), "w:4")
    daemon.say("scheduler", StoreHealth(state=StoreState.UP), "w:5")
    daemon.say("scheduler", Heartbeat())
    now_ns = world.now_ns
    world.poll_until(lambda: len(world.events) >= 5)
    assert world.events == [
        (LookupAnswered(now_ns=now_ns, rank=0, result=result), "w:1"),
        (PlanAcked(now_ns=now_ns, rank=0, step=8), "w:2"),
        (JobsReported(now_ns=now_ns, rank=0, ends=ends), "w:3"),
        (StoreChanged(now_ns=now_ns, rank=0, up=False, reason="timeouts"), "w:4"),
        (StoreChanged(now_ns=now_ns, rank=0, up=True), "w:5"),
    ]


def test_each_rank_has_its_own_daemon(daemon: FakeDaemon) -> None:
    with FakeDaemon() as second:
        world = World([daemon, second])
        assert world.ranks.identities == (
            RankIdentity(rank=0, fingerprint="print0"),
            RankIdentity(rank=1, fingerprint="print1"),
        )
        world.greet(0)
        assert world.greet(1).rank == 1
        world.ranks.send(1, StepPlan(step=3), "s:1")
        assert second.hear(StepPlan).step == 3
        assert second.envelope is not None
        assert (second.envelope.rank, second.envelope.cause) == (1, "s:1")
        assert daemon.silent()
        world.ranks.close()


def test_a_daemon_that_restarts_is_greeted_again(
    daemon: FakeDaemon, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.kvferry.ranks")
    world.greet()
    assert "is back" not in caplog.text
    daemon.stop()
    (event,) = world.take(1)
    lost(event, dead=False)
    # Until its death is known it may still touch our blocks.
    world.open_jobs[0] = (4, 9)
    world.watches[-1].died = True
    (event,) = world.take(1)
    lost(event, dead=True)
    daemon.start()
    assert world.hello().open_jobs == (4, 9)
    daemon.welcome(attached=False, pid=8)
    (event,) = world.take(1)
    assert isinstance(event, DaemonReady)
    assert event.epoch == daemon.epoch
    assert world.watches[-1].pid == 8
    # Else "serves without the cache" would be the last word of a log.
    assert caplog.text.count("is back (pid 8)") == 1


def test_a_dead_daemons_successor_is_greeted_by_an_idle_engine(
    daemon: FakeDaemon, world: World
) -> None:
    """One poll after the death is enough: hello and welcome pass while nobody polls."""
    world.greet()
    world.watches[-1].died = True
    daemon.stop()
    (event,) = world.take(1)
    lost(event, dead=True)
    world.now_ns += 1_000 * MS
    world.ranks.poll()
    daemon.start()
    daemon.hear(Hello)
    daemon.welcome(attached=True, pid=8)
    assert world.ranks.wait(0, 1_000)
    (event,) = world.take(1)
    assert isinstance(event, DaemonReady)
    assert event.attached


def test_a_daemon_that_restarts_unseen_is_being_greeted_after_one_poll(
    daemon: FakeDaemon, world: World
) -> None:
    world.greet()
    assert world.ranks.greeting() is None
    daemon.stop()
    world.watches[-1].died = True
    daemon.start()
    world.poll_until(lambda: world.ranks.greeting() == 0)
    daemon.hear(Hello)
    daemon.welcome(attached=True, pid=8)
    world.poll_until(lambda: world.ranks.greeting() is None)
    # One that does not come back is not waited for.
    world.now_ns += 1_000 * MS
    world.watches[-1].died = True
    daemon.stop()
    world.poll_until(lambda: world.ranks.greeting() == 0)
    world.now_ns += 1_000 * MS
    assert world.ranks.greeting() is None


def test_the_new_conversation_tells_of_open_jobs(daemon: FakeDaemon, world: World) -> None:
    world.greet()
    world.open_jobs[0] = (4, 9)
    daemon.say("scheduler", Refused(reason="out of step", resync=True))
    (event,) = world.take(1)
    lost(event, dead=False)
    world.now_ns += 1_000 * MS
    world.ranks.poll()
    assert daemon.hear(Hello).open_jobs == (4, 9)
    assert daemon.envelope is not None
    assert daemon.envelope.seq == 1


def test_a_daemon_that_dies_while_connected_is_dead_at_once(
    daemon: FakeDaemon, world: World
) -> None:
    world.greet()
    world.watches[-1].died = True
    daemon.stop()
    (event,) = world.take(1)
    lost(event, dead=True)
    world.ranks.poll()
    assert world.events == []


def test_a_gap_reopens_the_conversation_but_not_at_once(daemon: FakeDaemon, world: World) -> None:
    world.greet()
    daemon.skip("scheduler", PlanAck(step=1))
    daemon.say("scheduler", PlanAck(step=2))
    (event,) = world.take(1)
    lost(event, dead=False)
    world.ranks.poll()
    assert daemon.silent()
    world.now_ns += 1_000 * MS
    world.ranks.poll()
    world.greet()


@pytest.mark.parametrize("of_another_version", [False, True])
def test_a_refusal_is_said_once_and_tried_again_rarely(
    daemon: FakeDaemon,
    world: World,
    caplog: pytest.LogCaptureFixture,
    of_another_version: bool,
) -> None:
    caplog.set_level(logging.ERROR, logger="vllm.kvferry.ranks")
    refused = Refused(reason="another device", remedy="Start it for cpu:0.")
    say = daemon.say_of_version if of_another_version else daemon.say
    for round_ in range(3):
        daemon.hear(Hello)
        say("scheduler", refused)
        world.poll_until(lambda: daemon_refused(world))
        assert caplog.text.count("another device") == 1, round_
        assert "Start it for cpu:0." in caplog.text
        world.now_ns += 5_000 * MS
        world.ranks.poll()
        assert daemon.silent()
        world.now_ns += 6_000 * MS
        world.ranks.poll()
    # Never welcomed, so never lost.
    assert world.events == []
    world.greet()


def daemon_refused(world: World) -> bool:
    return world.ranks._ranks[0].reopen_at > world.now_ns


def test_heartbeats_while_nothing_else_is_said(daemon: FakeDaemon, world: World) -> None:
    world.greet()
    world.now_ns += (HEARTBEAT_MS - 1) * MS
    world.ranks.send(0, StepVerdict(step=1), "")
    world.now_ns += (HEARTBEAT_MS - 1) * MS
    world.ranks.poll()
    assert isinstance(daemon.hear_anything(), StepVerdict)
    assert daemon.silent()
    world.now_ns += 2 * MS
    world.ranks.poll()
    assert isinstance(daemon.hear_anything(), Heartbeat)
    assert daemon.silent()


def test_no_heartbeat_before_a_welcome(daemon: FakeDaemon, world: World) -> None:
    daemon.hear(Hello)
    # Less than after what it would say hello again.
    world.now_ns += 3 * HEARTBEAT_MS * MS
    world.ranks.poll()
    assert daemon.silent()


def test_a_daemon_that_takes_nothing_in_is_lost(daemon: FakeDaemon, world: World) -> None:
    world.greet()
    said = 0
    while not world.events:
        assert said < 1_000 * SEND_HIGH_WATER
        world.ranks.send(0, StepVerdict(step=said), "")
        said += 1
    (event,) = world.take(1)
    lost(event, dead=False)
    world.ranks.send(0, StepVerdict(step=said), "")
    # Told once.
    assert world.events == []
    # It comes to itself again and hears of what it missed in a new conversation.
    world.open_jobs[0] = (6,)
    world.now_ns += 1_000 * MS
    world.ranks.poll()
    body = daemon.hear_anything()
    while isinstance(body, StepVerdict):
        body = daemon.hear_anything()
    assert isinstance(body, Hello)
    assert body.open_jobs == (6,)
    daemon.welcome()
    assert isinstance(world.take(1)[0], DaemonReady)
