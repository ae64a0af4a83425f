"""One socket to one daemon, against a daemon that misbehaves on demand."""

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvcommon.ids import EngineId, Epoch, new_epoch
from kvcommon.messages import (
    Attached,
    FromDaemon,
    Heartbeat,
    Hello,
    PlanAck,
    Refused,
    StatusRequest,
)
from kvsched.link import SEND_HIGH_WATER, DaemonLink, LinkChange, ProcessWatch
from tests.support.fakedaemon import PATIENCE_MS, FakeDaemon, until

ENGINE = EngineId("engine")


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as running:
        yield running


@pytest.fixture
def epoch() -> Epoch:
    return new_epoch()


@pytest.fixture
def link(daemon: FakeDaemon, epoch: Epoch) -> Iterator[DaemonLink]:
    made = DaemonLink(daemon.context, daemon.endpoint, 3, "scheduler")
    made.open(ENGINE, epoch)
    yield made
    made.close()


def begin(daemon: FakeDaemon, link: DaemonLink) -> None:
    """Both have heard of each other."""
    assert link.send(Hello(pid=1, ranks=()), "log:7")
    daemon.hear(Hello)
    daemon.say("scheduler", Heartbeat())
    assert hear(link) == Heartbeat()


def hear(link: DaemonLink) -> FromDaemon | LinkChange | None:
    """The next of them; one that is dropped may end a wait early."""
    for _ in range(5):
        if (message := link.receive(PATIENCE_MS)) is not None:
            return message
    return None


def changes(link: DaemonLink, number: int) -> list[LinkChange]:
    """That many changes of the connection."""
    seen: list[LinkChange] = []

    def enough() -> bool:
        seen.extend(link.changes())
        return len(seen) >= number

    until(enough, link.wait)
    return seen


def test_what_is_said_arrives_with_its_cause(daemon: FakeDaemon, link: DaemonLink) -> None:
    assert link.daemon_epoch == 0
    begin(daemon, link)
    envelope = daemon.envelope
    assert envelope is not None
    assert (envelope.engine, envelope.rank, envelope.role) == ("engine", 3, "scheduler")
    assert envelope.cause == "log:7"
    daemon.say("scheduler", PlanAck(step=4), "kvworker:12")
    assert hear(link) == PlanAck(step=4)
    assert link.last_cause == "kvworker:12"
    assert link.daemon_epoch == daemon.epoch
    assert link.receive() is None


def test_a_link_that_is_not_open_says_and_hears_nothing(daemon: FakeDaemon) -> None:
    link = DaemonLink(daemon.context, daemon.endpoint, 0, "data")
    assert not link.send(Heartbeat())
    assert link.receive(PATIENCE_MS) is None
    assert not link.wait(PATIENCE_MS)
    assert list(link.changes()) == []
    assert link.daemon_epoch == 0
    link.close()


def test_a_lost_message_breaks_the_conversation(daemon: FakeDaemon, link: DaemonLink) -> None:
    begin(daemon, link)
    daemon.skip("scheduler", PlanAck(step=1))
    daemon.say("scheduler", PlanAck(step=2))
    assert hear(link) is LinkChange.BROKEN


def test_another_incarnation_breaks_the_conversation(daemon: FakeDaemon, link: DaemonLink) -> None:
    begin(daemon, link)
    daemon.channel("scheduler").epoch = new_epoch()
    daemon.say("scheduler", PlanAck(step=2))
    assert hear(link) is LinkChange.BROKEN


def test_a_repeated_message_is_dropped(daemon: FakeDaemon, link: DaemonLink) -> None:
    begin(daemon, link)
    frame = daemon.channel("scheduler").stamp(PlanAck(step=1))
    daemon.say_frame("scheduler", frame)
    daemon.say_frame("scheduler", frame)
    daemon.say("scheduler", PlanAck(step=2))
    assert hear(link) == PlanAck(step=1)
    assert hear(link) == PlanAck(step=2)
    assert link.num_bad == 0


def test_nonsense_is_counted_and_dropped(daemon: FakeDaemon, link: DaemonLink) -> None:
    begin(daemon, link)
    daemon.say_frame("scheduler", b"\xff nonsense")
    daemon.say_of_unknown_type("scheduler")
    daemon.say("scheduler", PlanAck(step=2))
    assert hear(link) == PlanAck(step=2)
    assert link.num_bad == 2


def test_another_version_can_only_refuse(
    daemon: FakeDaemon, link: DaemonLink, caplog: pytest.LogCaptureFixture
) -> None:
    begin(daemon, link)
    daemon.say_of_version("scheduler", Attached(pid=1))
    daemon.say_of_version("scheduler", Refused(reason="protocol version 1", remedy="upgrade"))
    caplog.set_level(logging.WARNING, logger="vllm.kvferry.link")
    assert hear(link) == Refused(reason="protocol version 1", remedy="upgrade")
    assert link.num_bad == 1
    assert "Attached of protocol version" in caplog.text


def test_a_full_queue_refuses_without_a_gap(epoch: Epoch) -> None:
    with FakeDaemon(bound=False) as absent:
        link = DaemonLink(absent.context, absent.endpoint, 0, "scheduler")
        link.open(ENGINE, epoch)
        said = 0
        while said <= SEND_HIGH_WATER and link.send(StatusRequest(step=said + 1)):
            said += 1
        assert said == SEND_HIGH_WATER
        absent.start()
        for step in range(1, said + 1):
            assert absent.hear(StatusRequest).step == step
        assert link.send(StatusRequest())
        absent.hear(StatusRequest)
        assert absent.envelope is not None
        assert absent.envelope.seq == said + 1
        link.close()


def test_opening_again_is_a_new_conversation(
    daemon: FakeDaemon, link: DaemonLink, epoch: Epoch
) -> None:
    begin(daemon, link)
    first = daemon.peers["scheduler"]
    # Queued for the old conversation; must not be heard in the new one.
    daemon.say("scheduler", PlanAck(step=1))
    assert link.wait(PATIENCE_MS)
    link.open(ENGINE, epoch)
    assert link.daemon_epoch == 0
    link.send(Hello(pid=2, ranks=()))
    assert daemon.hear(Hello).pid == 2
    assert daemon.envelope is not None
    assert daemon.envelope.seq == 1
    assert daemon.peers["scheduler"] != first
    daemon.say("scheduler", PlanAck(step=9))
    assert hear(link) == PlanAck(step=9)


def test_connections_come_and_go(daemon: FakeDaemon, link: DaemonLink) -> None:
    assert changes(link, 1) == [LinkChange.CONNECTED]
    daemon.stop()
    assert changes(link, 1) == [LinkChange.DISCONNECTED]
    daemon.start()
    assert changes(link, 1) == [LinkChange.CONNECTED]


def test_waiting_sees_messages(daemon: FakeDaemon, link: DaemonLink) -> None:
    changes(link, 1)
    assert not link.wait(0)
    begin(daemon, link)
    daemon.say("scheduler", Heartbeat())
    assert link.wait(PATIENCE_MS)
    assert hear(link) == Heartbeat()


def test_opening_and_closing_leaks_no_descriptors(
    daemon: FakeDaemon, link: DaemonLink, epoch: Epoch
) -> None:
    changes(link, 1)
    before = psutil.Process().num_fds()
    for _ in range(30):
        link.open(ENGINE, epoch)
        changes(link, 1)
    link.close()
    # libzmq's own thread closes the rest a moment later; thirty sockets would be hundreds.
    assert psutil.Process().num_fds() < before + 30


def test_watch_sees_a_process_end() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        watch = ProcessWatch(process.pid)
        assert not watch.is_dead()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert watch.is_dead()
    # Also when nothing is left of it but its number.
    assert watch.is_dead()
    watch.close()
    watch.close()


def test_watching_nobody_never_says_dead() -> None:
    watch = ProcessWatch(0)
    assert not watch.is_dead()
    watch.close()


def test_a_process_that_is_gone_already_is_dead() -> None:
    limit = int(Path("/proc/sys/kernel/pid_max").read_text("ascii"))
    watch = ProcessWatch(limit + 1)
    assert watch.is_dead()
    watch.close()
