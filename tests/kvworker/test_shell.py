"""The real daemon in its own process: a whole life of an engine, its start and its end."""

import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommon.config import DaemonConfig
from kvcommon.errors import ConfigError, LocalProtocolError
from kvcommon.eventlog import read_log
from kvcommon.messages import (
    Detach,
    JobOutcome,
    JobsEnded,
    LoadJob,
    PlanAck,
    Refused,
    StepBegun,
    StepPlan,
    Welcome,
)
from kvworker.core.events import EngineUnmapped
from kvworker.shell import Daemon
from tests.support.client import Client
from tests.support.daemonproc import DaemonProcess, daemon
from tests.support.engine import HASHES, attach, lookup, save
from tests.support.fakemodel import NUM_LAYERS, FakeModel


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
        assert data.hear(JobsEnded).ends[0].job_id == 11
        scheduler.say(StepPlan(step=12, loads=(later,)))
        scheduler.hear(PlanAck)
        data.say(StepBegun(step=12))
        assert data.hear(JobsEnded).ends[0].job_id == 12
        assert scheduler.hear(JobsEnded).ends[0].outcome is JobOutcome.DONE
        assert (model.block(9), model.block(10)) == written
        control.say(Detach())
        assert not scheduler.hear(Welcome).attached


def test_device_of_another_daemon_is_refused(served: DaemonProcess) -> None:
    model = FakeModel(device="cpu:1")
    with Client(served.endpoint, "model", "elsewhere") as control:
        control.say(model.attach())
        refused = control.hear(Refused)
        assert "cpu:1" in refused.reason
        assert not refused.resync
    model.close()


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
