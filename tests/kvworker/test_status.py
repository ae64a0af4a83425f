"""What a daemon says of itself."""

import os

import pytest
import zmq

from kvcommon.config import DaemonConfig
from kvcommon.messages import StoreState
from kvworker.assembly import assemble, opening_store
from kvworker.conversations import Conversations
from kvworker.devices.factory import make_device
from kvworker.router import Router
from kvworker.status import describe


def test_joins_core_store_and_shell() -> None:
    config = DaemonConfig(device="cpu:0", store="memory", memory_limit=1 << 20)
    store = opening_store(config, lambda: None)
    machinery = assemble(config, 1, make_device("cpu:0"), store, lambda _event: None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    talk = Conversations(Router(context), 1)
    talk.counts["kvferry_worker_messages_sent_total"] += 3

    closed = describe(config, "ipc:///x", 2_500_000_000, machinery, talk)
    assert closed.store_state is StoreState.DOWN, "not open yet"
    assert closed.metrics["kvferry_store_up"] == 0
    store.open()
    assert store.wait(10)
    shown = describe(config, "ipc:///x", 2_500_000_000, machinery, talk)
    machinery.executor.close()
    store.close()
    context.term()

    assert shown.store_state is StoreState.UP
    assert (shown.pid, shown.device, shown.store) == (os.getpid(), "cpu:0", "memory")
    assert shown.uptime_s == pytest.approx(2.5)
    assert shown.metrics["kvferry_worker_messages_sent_total"] == 3
    assert shown.metrics["kvferry_store_bytes_limit"] == 1 << 20
    assert shown.metrics["kvferry_store_up"] == 1
    assert all(name.startswith("kvferry_") for name in shown.metrics)
