"""The same daemon in a thread: reachable inside the process and from outside it."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvcommon.config import DaemonConfig
from kvcommon.errors import ConfigError
from kvcommon.messages import Attached, Hello, RankIdentity, Welcome
from kvworker.ask import ask_status
from kvworker.inline import start
from tests.support.client import Client
from tests.support.fakemodel import FINGERPRINT, FakeModel


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.term()


def config(run_dir: Path, device: str = "cpu:0") -> DaemonConfig:
    return DaemonConfig(
        device=device,
        store="memory",
        run_dir=str(run_dir),
        endpoint=f"ipc://{run_dir}/in-e-0-{os.getpid()}.sock",
        validate=True,
    )


def test_serves_both_sides_and_leaves_nothing(
    tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    threads = set(threading.enumerate())
    handle = start(config(tmp_path), context=context, endpoints=("inproc://near",))
    assert handle.is_serving
    model = FakeModel()
    with (
        Client("inproc://near", "model", context=context) as control,
        Client(handle.endpoint, "scheduler") as scheduler,
    ):
        ranks = (RankIdentity(rank=0, fingerprint=FINGERPRINT),)
        scheduler.say(Hello(pid=os.getpid(), ranks=ranks))
        assert not scheduler.hear(Welcome).attached
        control.say(model.attach())
        assert control.hear(Attached).pid == os.getpid()
        assert scheduler.hear(Welcome).attached
    assert ask_status(handle.endpoint, 10).pid == os.getpid()
    handle.stop()
    handle.stop()
    model.close()
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert set(threading.enumerate()) <= threads, "it is not serving any more"


def test_a_failed_start_raises_where_it_was_asked_for(
    tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    with pytest.raises(ConfigError, match="gpu:0"):
        start(config(tmp_path, device="gpu:0"), context=context, endpoints=())
    handle = start(config(tmp_path), context=context, endpoints=("inproc://near",))
    handle.stop()
