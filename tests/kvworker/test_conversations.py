"""What the daemon says, to whom, and what becomes of it, over a real in-process socket."""

import time
from collections.abc import Iterator

import pytest
import zmq

from kvcommon.messages import (
    Attached,
    Heartbeat,
    Hello,
    JobEnd,
    JobOutcome,
    JobsEnded,
    Refused,
    StatusRequest,
    StepBegun,
    StepPlan,
    Welcome,
)
from kvworker.conversations import _MAX_PENDING, Asked, Conversations, Heard, Lost, Said
from kvworker.peers import PeerKey, Role
from kvworker.router import Router
from tests.support.client import Client
from tests.support.fakemodel import FakeModel

EPOCH = 99
SECOND = 1_000_000_000
HELLO = Hello(pid=0, ranks=())
ENDED = JobsEnded(ends=(JobEnd(job_id=1, outcome=JobOutcome.DONE),))
Context = zmq.Context[zmq.Socket[bytes]]


class Rig:
    """Conversations over ``inproc``, and the peers they talk to."""

    def __init__(self) -> None:
        self.context: Context = zmq.Context()
        self.router = Router(self.context)
        self.router.bind(["inproc://daemon"])
        self.talk = Conversations(self.router, EPOCH)
        self.clients: list[Client] = []

    def client(self, role: str, epoch: int = 7) -> Client:
        made = Client("inproc://daemon", role, epoch=epoch, context=self.context)
        self.clients.append(made)
        return made

    def heard(self, now_ns: int = 0) -> list[Heard]:
        assert self.router.socket.poll(10_000)
        return list(self.talk.receive(100, now_ns))

    def opened(self, role: str, now_ns: int = 0, lease_ms: int = 0) -> Client:
        """A client whose conversation has begun."""
        client = self.client(role)
        if role == "model":
            model = FakeModel()
            client.say(model.attach(lease_ms))
            model.close()
        else:
            client.say(HELLO if role == "scheduler" else StepBegun(step=1))
        [said] = self.heard(now_ns)
        assert isinstance(said, Said)
        assert said.opened
        return client

    def count(self, name: str) -> int:
        return self.talk.counts[f"kvferry_worker_{name}_total"]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.router.close()
        self.context.term()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_what_is_said_carries_the_peers_cause(rig: Rig) -> None:
    client = rig.client("scheduler")
    client.say(HELLO, cause="kvsched-1:5")
    [said] = rig.heard()
    assert isinstance(said, Said)
    assert (said.body, said.cause) == (HELLO, "kvsched-1:5")
    assert said.peer.key == PeerKey(said.peer.key.engine, Role.SCHEDULER)
    assert said.peer.epoch == 7


def test_messages_reach_the_side_that_is_meant(rig: Rig) -> None:
    scheduler, model = rig.opened("scheduler"), rig.opened("model")
    rig.talk.send("e#0", Role.MODEL, Attached(pid=1), "c:1", 0)
    rig.talk.send("e#0", Role.SCHEDULER, Welcome(pid=1, device="d", attached=True), "c:2", 0)
    model.hear(Attached)
    scheduler.hear(Welcome)
    assert scheduler.envelope is not None
    assert scheduler.envelope.cause == "c:2"


def test_ended_jobs_wait_for_the_data_conversation(rig: Rig) -> None:
    rig.opened("model")
    rig.talk.send("e#0", Role.MODEL, ENDED, "", 0)
    data = rig.opened("data")
    assert data.hear(JobsEnded) == ENDED
    rig.talk.send("e#0", Role.MODEL, ENDED, "", 0)
    assert data.hear(JobsEnded) == ENDED


def test_a_data_conversation_that_never_begins_ends_the_side(rig: Rig) -> None:
    model = rig.opened("model")
    for _ in range(_MAX_PENDING):
        rig.talk.send("e#0", Role.MODEL, ENDED, "", 0)
    assert not list(rig.talk.lost())
    rig.talk.send("e#0", Role.MODEL, ENDED, "", 0)
    [lost] = rig.talk.lost()
    assert lost.key.role is Role.MODEL
    model.say(Heartbeat())
    rig.heard()
    assert model.hear(Refused).resync


def test_nobody_there_is_counted(rig: Rig) -> None:
    rig.talk.send("absent#0", Role.SCHEDULER, Heartbeat(), "", 0)
    assert rig.count("messages_unsent") == 1


def test_unreachable_side_is_lost_once(rig: Rig) -> None:
    client = rig.opened("scheduler")
    client.close()
    rig.clients.remove(client)
    deadline = time.monotonic() + 10
    losses: list[Lost] = []
    while not losses:
        # Closing takes effect in libzmq's own time.
        assert time.monotonic() < deadline
        rig.talk.send("e#0", Role.SCHEDULER, Heartbeat(), "", 0)
        losses += rig.talk.lost()
    rig.talk.send("e#0", Role.SCHEDULER, Heartbeat(), "", 0)
    [lost] = [*losses, *rig.talk.lost()]
    assert (lost.key.role, lost.epoch) == (Role.SCHEDULER, 7)
    assert "gone" in lost.reason


def test_gap_breaks_both_conversations_of_a_model_side(rig: Rig) -> None:
    model, data = rig.opened("model"), rig.opened("data")
    data.skip(StepBegun(step=2))
    data.say(StepBegun(step=3))
    [lost] = rig.heard()
    assert isinstance(lost, Lost)
    assert lost.key.role is Role.MODEL
    assert data.hear(Refused).resync
    assert model.hear(Refused).resync
    assert not len(rig.talk.peers)


def test_refusals_are_limited_per_peer_and_time(rig: Rig) -> None:
    stranger = rig.client("scheduler")
    for _ in range(3):
        stranger.say(StepPlan(step=1))
    assert rig.heard(now_ns=0) == []
    assert stranger.hear(Refused).resync
    assert not stranger.socket.poll(0)
    stranger.say(StepPlan(step=1))
    rig.heard(now_ns=SECOND)
    assert stranger.hear(Refused).resync
    assert rig.count("messages_refused") == 4


def test_what_a_role_may_not_say_is_dropped_but_counted_in(rig: Rig) -> None:
    scheduler = rig.opened("scheduler")
    scheduler.say(StepBegun(step=1))
    scheduler.say(StepPlan(step=1))
    [said] = rig.heard()
    assert isinstance(said, Said)
    assert said.body == StepPlan(step=1)
    assert rig.count("messages_dropped") == 1


def test_a_new_model_incarnation_ends_the_old_data_conversation(rig: Rig) -> None:
    rig.opened("model")
    data = rig.opened("data")
    newer = rig.client("model", epoch=8)
    model = FakeModel()
    newer.say(model.attach())
    model.close()
    rig.heard()
    data.say(StepBegun(step=2))
    assert rig.heard() == []
    assert data.hear(Refused).resync


def test_status_needs_no_conversation(rig: Rig) -> None:
    client = rig.client("status")
    client.say(StatusRequest())
    [asked] = rig.heard()
    assert isinstance(asked, Asked)
    rig.talk.answer(asked, Heartbeat())
    assert client.hear_anything() == Heartbeat()


def test_heartbeats_are_due_after_silence_of_ours(rig: Rig) -> None:
    scheduler = rig.opened("scheduler", now_ns=0)
    rig.talk.tick(SECOND - 1, SECOND, set())
    rig.talk.tick(SECOND, SECOND, set())
    rig.talk.tick(SECOND + 1, SECOND, set())
    assert isinstance(scheduler.hear_anything(), Heartbeat)
    assert not scheduler.socket.poll(0)


def test_an_idle_peer_gets_few_heartbeats_or_none_if_watched(rig: Rig) -> None:
    rig.opened("scheduler", now_ns=0)
    peer = rig.talk.peers.get("e#0", Role.SCHEDULER)
    assert peer is not None
    for second in range(1, 100):
        rig.talk.tick(second * SECOND, SECOND, {peer.key})
    assert peer.channel.sent == 32
    for second in range(100, 300):
        rig.talk.tick(second * SECOND, SECOND, set())
    assert 34 <= peer.channel.sent <= 37


def test_silence_beyond_the_lease_is_a_loss(rig: Rig) -> None:
    rig.opened("model", now_ns=0, lease_ms=500)
    rig.talk.tick(SECOND // 2, 10 * SECOND, set())
    assert not list(rig.talk.lost())
    rig.talk.tick(SECOND // 2 + 1, 10 * SECOND, set())
    [lost] = rig.talk.lost()
    assert "lease" in lost.reason


def test_end_of_a_process_is_a_loss_once(rig: Rig) -> None:
    rig.opened("model")
    peer = rig.talk.peers.get("e#0", Role.MODEL)
    assert peer is not None
    rig.talk.drop(peer.key, "its process ended")
    rig.talk.drop(peer.key, "its process ended")
    assert [lost.reason for lost in rig.talk.lost()] == ["its process ended"]
