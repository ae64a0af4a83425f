"""What must not end a daemon: strangers, junk, gaps, dead and silent engines. Real processes."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcommon.channel import Channel
from kvcommon.ids import new_epoch
from kvcommon.messages import (
    Attached,
    CancelJobs,
    Detach,
    Envelope,
    Heartbeat,
    JobsEnded,
    LookupResult,
    Refused,
    StatusRequest,
    StepBegun,
    StepPlan,
    Welcome,
    decode_from_daemon,
    encode,
)
from kvcommon.messages.codec import decode_envelope, encode_body
from kvworker.loop import Loop
from tests.support.client import PATIENCE_MS, Client
from tests.support.daemonproc import DaemonProcess, daemon, environment
from tests.support.engine import attach, hello, lookup
from tests.support.fakemodel import FakeModel


@pytest.fixture(scope="module")
def served() -> Iterator[DaemonProcess]:
    """One daemon for the tests that must leave it healthy."""
    with daemon() as running:
        yield running


@pytest.fixture
def model() -> Iterator[FakeModel]:
    made = FakeModel()
    yield made
    made.close()


def test_what_the_daemon_says_names_its_cause(served: DaemonProcess) -> None:
    with Client(served.endpoint, "scheduler", "cause") as scheduler:
        scheduler.say(hello(), cause="kvsched-x:1")
        scheduler.hear(Welcome)
        assert scheduler.envelope is not None
        assert scheduler.envelope.cause.startswith("kvworker-cpu-0-")
        assert scheduler.envelope.ack == 1


def test_heartbeats_come_without_traffic(served: DaemonProcess) -> None:
    with Client(served.endpoint, "scheduler", "idle") as scheduler:
        scheduler.say(hello())
        scheduler.hear(Welcome)
        assert isinstance(scheduler.hear_anything(), Heartbeat)


@pytest.mark.parametrize(
    ("role", "body"),
    [
        ("model", StepBegun(step=1)),
        ("data", StepBegun(step=1)),
        ("data", CancelJobs(job_ids=(1,))),
        ("scheduler", StepPlan(step=1)),
        ("scheduler", Heartbeat()),
    ],
)
def test_a_stranger_is_told_to_begin(served: DaemonProcess, role: str, body: Heartbeat) -> None:
    with Client(served.endpoint, role, "stranger") as client:
        client.say(body)
        assert client.hear(Refused).resync


def test_gap_is_refused_and_hello_begins_again(served: DaemonProcess) -> None:
    with Client(served.endpoint, "scheduler", "gap") as scheduler:
        scheduler.say(hello())
        scheduler.hear(Welcome)
        scheduler.skip(Heartbeat())
        scheduler.say(Heartbeat())
        assert scheduler.hear(Refused).resync
        scheduler.channel.reset()
        scheduler.say(hello(open_jobs=(99,)))
        scheduler.hear(Welcome)
        assert [end.job_id for end in scheduler.hear(JobsEnded).ends] == [99]


def test_gap_on_data_ends_the_attachment(served: DaemonProcess, model: FakeModel) -> None:
    with (
        Client(served.endpoint, "model", "datagap") as control,
        Client(served.endpoint, "data", "datagap", epoch=control.channel.epoch) as data,
        Client(served.endpoint, "scheduler", "datagap") as scheduler,
    ):
        attach(control, scheduler, model)
        data.say(StepBegun(step=1))
        data.skip(StepBegun(step=2))
        data.say(StepBegun(step=3))
        assert data.hear(Refused).resync
        assert control.hear(Refused).resync
        assert not scheduler.hear(Welcome).attached
        control.channel.reset()
        control.say(model.attach())
        control.hear(Attached)
        assert scheduler.hear(Welcome).attached


def test_message_for_a_daemon_before_is_refused(served: DaemonProcess) -> None:
    with Client(served.endpoint, "scheduler", "past") as scheduler:
        scheduler.channel.peer_epoch = 12345
        scheduler.say(Heartbeat())
        assert scheduler.socket.poll(PATIENCE_MS)
        refused = decode_from_daemon(decode_envelope(scheduler.socket.recv()))
        assert isinstance(refused, Refused)
        assert refused.resync


def test_another_protocol_version_is_told_both(served: DaemonProcess) -> None:
    with Client(served.endpoint, "scheduler", "version") as scheduler:
        for _ in range(3):
            envelope = Envelope(
                version=99,
                engine="version",
                rank=0,
                role="scheduler",
                epoch=scheduler.channel.epoch,
                seq=1,
                body=encode_body(hello()),
            )
            scheduler.socket.send(encode(envelope))
        refused = scheduler.hear(Refused)
        assert "99" in refused.reason
        assert "1" in refused.reason.replace("99", "")
        assert not refused.resync
        served.status()
        assert not scheduler.socket.poll(0), "told once is enough"


def junk(rng: random.Random) -> list[bytes]:
    """One nonsensical multipart message."""
    valid = Channel("junk", 0, "scheduler", new_epoch()).stamp(hello())
    cut = valid[: rng.randrange(len(valid))]
    flipped = bytearray(valid)
    flipped[rng.randrange(len(valid))] ^= 1 << rng.randrange(8)
    return rng.choice(
        [
            [b""],
            [rng.randbytes(rng.randrange(300))],
            [cut],
            [bytes(flipped)],
            [b"", valid],
            [valid, valid],
            [b"x"] * rng.randrange(3, 200),
            [rng.randbytes(1 << 16)],
        ]
    )


def test_junk_is_counted_and_survived(served: DaemonProcess) -> None:
    rng = random.Random(20261130)
    before = served.status().metrics
    with zmq.Context() as context:
        for _ in range(5):
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
                socket.connect(served.endpoint)
                for _ in range(100):
                    socket.send_multipart(junk(rng))
                # Answered last, so that all of it has been read.
                socket.send(Channel("", 0, "status", new_epoch()).stamp(StatusRequest()))
                answer = ""
                while answer != "Status":
                    assert socket.poll(PATIENCE_MS)
                    body = decode_from_daemon(decode_envelope(socket.recv()))
                    answer = type(body).__name__
    name = "kvferry_worker_messages_dropped_total"
    assert served.status().metrics[name] > before.get(name, 0) + 100
    with Client(served.endpoint, "scheduler", "after-junk") as scheduler:
        scheduler.say(hello())
        scheduler.hear(Welcome)


def test_unknown_message_type_is_dropped_in_sequence(served: DaemonProcess) -> None:
    with Client(served.endpoint, "scheduler", "future") as scheduler:
        scheduler.say(hello())
        scheduler.hear(Welcome)
        scheduler.channel.sent += 1
        envelope = Envelope(
            version=1,
            engine="future",
            rank=0,
            role="scheduler",
            epoch=scheduler.channel.epoch,
            seq=scheduler.channel.sent,
            body=encode_body(LookupResult(lookup_id=1, hits=())),
        )
        scheduler.socket.send(encode(envelope))
        assert lookup(scheduler, 1) == 0


def test_a_role_may_not_say_what_the_other_says(served: DaemonProcess, model: FakeModel) -> None:
    with Client(served.endpoint, "scheduler", "roles") as scheduler:
        scheduler.say(hello())
        scheduler.hear(Welcome)
        scheduler.say(model.attach())
        assert lookup(scheduler, 1) == 0
        assert not served.has_mapped(model.inode)


def test_killed_model_is_noticed_and_unmapped(served: DaemonProcess) -> None:
    arguments = [sys.executable, "-m", "tests.support.fakemodel", served.endpoint, "killed"]
    with Client(served.endpoint, "scheduler", "killed") as scheduler:
        scheduler.say(hello())
        scheduler.hear(Welcome)
        with subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
        ) as process:
            assert process.stdout is not None
            inode = int(process.stdout.readline())
            assert scheduler.hear(Welcome).attached
            assert served.has_mapped(inode)
            process.send_signal(signal.SIGKILL)
            assert not scheduler.hear(Welcome).attached
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while served.has_mapped(inode):
        assert time.monotonic() < deadline, "still mapped"
        time.sleep(0.01)


def test_silent_model_loses_its_lease(served: DaemonProcess, model: FakeModel) -> None:
    with (
        Client(served.endpoint, "model", "lease") as control,
        Client(served.endpoint, "scheduler", "lease") as scheduler,
    ):
        scheduler.say(hello())
        scheduler.hear(Welcome)
        control.say(model.attach(lease_ms=300))
        control.hear(Attached)
        assert scheduler.hear(Welcome).attached
        assert not scheduler.hear(Welcome).attached
        control.say(Heartbeat())
        assert control.hear(Refused).resync


def test_many_engines_come_and_go_without_a_trace(served: DaemonProcess) -> None:
    def open_files() -> int:
        return len(list(Path(f"/proc/{served.pid}/fd").iterdir()))

    before = open_files()
    for number in range(12):
        model = FakeModel()
        with (
            Client(served.endpoint, "model", f"many{number}") as control,
            Client(served.endpoint, "scheduler", f"many{number}") as scheduler,
        ):
            attach(control, scheduler, model)
            control.say(Detach())
            assert not scheduler.hear(Welcome).attached
        model.close()
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while open_files() > before:
        assert time.monotonic() < deadline, "descriptors are left"
        time.sleep(0.05)


def test_lost_records_are_complained_of_but_not_each(caplog: pytest.LogCaptureFixture) -> None:
    unused: Any = None
    loop = Loop(unused, unused, unused, unused, 1000.0)
    second = 1_000_000_000
    for now_s, num_dropped in [(1, 0), (2, 5), (3, 9), (63, 9), (70, 9), (140, 12)]:
        loop.now_ns = now_s * second
        loop._complain_of(num_dropped)
    said = [record.getMessage().split(" records")[0] for record in caplog.records]
    assert said == [f"the event log has lost {num}" for num in (5, 9, 12)]
