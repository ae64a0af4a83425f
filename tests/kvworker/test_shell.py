"""The real daemon in its own process: a whole life of an engine, and what must not end it."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvcommon.channel import Channel
from kvcommon.config import DaemonConfig
from kvcommon.errors import ConfigError, LocalProtocolError
from kvcommon.eventlog import read_log
from kvcommon.ids import new_epoch
from kvcommon.messages import (
    Attached,
    CancelJobs,
    Detach,
    Envelope,
    Heartbeat,
    Hello,
    JobOutcome,
    JobsEnded,
    LayersComputed,
    LoadJob,
    Lookup,
    LookupGroup,
    LookupResult,
    PlanAck,
    RankIdentity,
    Refused,
    SaveJob,
    StatusRequest,
    StepBegun,
    StepPlan,
    StepVerdict,
    Welcome,
    decode_from_daemon,
    encode,
)
from kvcommon.messages.codec import decode_envelope, encode_body
from kvworker.core.events import EngineUnmapped
from kvworker.shell import Daemon
from tests.support.client import PATIENCE_MS, Client
from tests.support.daemonproc import DaemonProcess, daemon, environment
from tests.support.fakemodel import FINGERPRINT, NUM_LAYERS, FakeModel

HASHES = (b"\x01" * 32, b"\x02" * 32)


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


def hello(open_jobs: tuple[int, ...] = ()) -> Hello:
    ranks = (RankIdentity(rank=0, fingerprint=FINGERPRINT),)
    return Hello(pid=os.getpid(), ranks=ranks, open_jobs=open_jobs)


def lookup(scheduler: Client, number: int) -> int:
    """How many of the two blocks are stored."""
    groups = (LookupGroup(group=0, block_hashes=HASHES),)
    scheduler.say(Lookup(lookup_id=number, request_id=f"r{number}", groups=groups))
    result = scheduler.hear(LookupResult)
    assert result.lookup_id == number
    return result.hits[0].num_blocks if result.hits else 0


def attach(control: Client, scheduler: Client, model: FakeModel) -> None:
    """Both sides say who they are; the daemon maps the memory."""
    scheduler.say(hello())
    assert not scheduler.hear(Welcome).attached
    control.say(model.attach())
    control.hear(Attached)
    assert scheduler.hear(Welcome).attached


def save(scheduler: Client, data: Client, step: int, blocks: tuple[int, int]) -> JobsEnded:
    """Save two blocks in one step, layer by layer."""
    job = SaveJob(job_id=step, request_id="r", group=0, block_ids=blocks, block_hashes=HASHES)
    scheduler.say(StepPlan(step=step, saves=(job,)))
    scheduler.hear(PlanAck)
    data.say(StepBegun(step=step))
    for layer in range(NUM_LAYERS):
        data.say(LayersComputed(step=step, num_layers=layer + 1))
    scheduler.say(StepVerdict(step=step))
    return scheduler.hear(JobsEnded)


def test_save_lookup_and_load_move_the_same_bytes(served: DaemonProcess, model: FakeModel) -> None:
    with (
        Client(served.endpoint, "model", "life") as control,
        Client(served.endpoint, "data", "life", epoch=control.channel.epoch) as data,
        Client(served.endpoint, "scheduler", "life") as scheduler,
    ):
        attach(control, scheduler, model)
        assert lookup(scheduler, 1) == 0
        written = model.fill(3, seed=1), model.fill(5, seed=2)
        ended = save(scheduler, data, step=10, blocks=(3, 5))
        assert [(end.job_id, end.outcome) for end in ended.ends] == [(10, JobOutcome.DONE)]
        assert ended.ends[0].num_bytes == len(written[0]) + len(written[1])

        assert lookup(scheduler, 2) == 2
        load = LoadJob(
            job_id=11,
            request_id="r",
            group=0,
            block_ids=(7, 8),
            block_hashes=HASHES,
            layerwise=True,
            lookup_id=2,
        )
        scheduler.say(StepPlan(step=11, loads=(load,)))
        scheduler.hear(PlanAck)
        data.say(StepBegun(step=11))
        assert scheduler.hear(JobsEnded).ends[0].outcome is JobOutcome.DONE
        assert model.page.read(11) == (NUM_LAYERS, False)
        assert (model.block(7), model.block(8)) == written

        later = LoadJob(
            job_id=12,
            request_id="r",
            group=0,
            block_ids=(9, 10),
            block_hashes=HASHES,
            layerwise=False,
        )
        scheduler.say(StepPlan(step=12, loads=(later,)))
        scheduler.hear(PlanAck)
        data.say(StepBegun(step=12))
        assert data.hear(JobsEnded).ends[0].job_id == 12
        assert scheduler.hear(JobsEnded).ends[0].outcome is JobOutcome.DONE
        assert (model.block(9), model.block(10)) == written
        control.say(Detach())
        assert not scheduler.hear(Welcome).attached


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


def test_device_of_another_daemon_is_refused(served: DaemonProcess) -> None:
    model = FakeModel(device="cpu:1")
    with Client(served.endpoint, "model", "elsewhere") as control:
        control.say(model.attach())
        refused = control.hear(Refused)
        assert "cpu:1" in refused.reason
        assert not refused.resync
    model.close()


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


def test_the_daemon_has_not_loaded_torch_or_vllm(served: DaemonProcess) -> None:
    assert "libtorch" not in served.maps
    assert "vllm" not in served.maps


def test_a_fault_of_the_core_ends_serving_and_says_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = DaemonConfig(
        device="cpu:0", store="memory", run_dir=str(tmp_path), event_log=str(tmp_path / "log")
    )
    running = Daemon(config)
    running.start()
    running._inbox.post(EngineUnmapped(now_ns=0, op=12345, engine="nobody#0"))
    with pytest.raises(LocalProtocolError, match="12345"):
        running.serve()
    assert running.close()
    assert f"{tmp_path}/log" in caplog.text
    [log] = (tmp_path / "log").iterdir()
    assert list(read_log(log)), "the event at fault is in the log"
    assert not (tmp_path / "cpu-0.sock").exists()


def test_stop_ends_serving(tmp_path: Path) -> None:
    running = Daemon(DaemonConfig(device="cpu:0", store="memory", run_dir=str(tmp_path)))
    running.start()
    assert (tmp_path / "cpu-0.sock").stat().st_mode & 0o077 == 0
    running.stop()
    running.serve()
    assert running.close()
    assert running.close()
    assert not (tmp_path / "cpu-0.json").exists()


def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    running = Daemon(DaemonConfig(device="gpu:0", store="memory", run_dir=str(tmp_path)))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError, match="gpu:0"):
        running.start()
    assert running.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < before
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-0.sock.lock"]


def test_metrics_are_served_while_it_serves(tmp_path: Path) -> None:
    running = Daemon(
        DaemonConfig(device="cpu:0", store="memory", run_dir=str(tmp_path)), metrics_port=0
    )
    running.start()
    assert running._metrics is not None
    assert running._metrics._server is not None
    port = running._metrics._server.server_port
    thread = threading.Thread(target=running.serve)
    thread.start()
    text = ""
    while "kvferry_store_up 1.0" not in text:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
    running.stop()
    thread.join()
    assert running.close()
