"""Fifty daemons that crash under one engine: the engine's process does not grow."""

import subprocess
import time
from pathlib import Path

import psutil
import zmq

from kvcommon.endpoints import daemon_endpoint
from kvcommon.ids import EngineId, Epoch
from kvsched.attachment import Attachment
from kvsched.core.events import DaemonReady
from kvsched.link import DaemonLink
from tests.kvsched.test_fencing import Listener
from tests.support.daemonproc import DaemonProcess, command, environment
from tests.support.fakemodel import FakeModel

CYCLES = 50
PATIENCE_S = 60.0
SLACK_BYTES = 16 << 20


def start(directory: Path) -> "DaemonProcess":
    with (directory / "stderr.log").open("ab") as log:
        process = subprocess.Popen(
            command("serve", "--device", "cpu:0", "--run-dir", str(directory), "--store", "memory"),
            stderr=log,
            env=environment(),
        )
    return DaemonProcess(directory, "cpu:0", process)


def test_fifty_daemons_crash_under_one_engine(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = daemon_endpoint(tmp_path, "cpu:0")
    model = FakeModel()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    attachment = Attachment(
        lambda: DaemonLink(context, endpoint, 0, "model"),
        EngineId("e"),
        Epoch(5),
        export=model.attach,
        page=model.page,
        heartbeat_ms=100,
    )
    listener = Listener(endpoint)
    watched = psutil.Process()
    fds = size = maps = 0
    try:
        for cycle in range(CYCLES + 5):
            daemon = start(tmp_path)
            deadline = time.monotonic() + PATIENCE_S
            while not (attachment.generation == cycle + 1 and _attached(listener)):
                assert time.monotonic() < deadline, daemon.log
                listener.ranks.wait(0, 20)
                listener.ranks.poll()
            listener.events.clear()
            daemon.process.kill()
            daemon.process.wait(PATIENCE_S)
            if cycle == 4:
                fds, size = watched.num_fds(), watched.memory_info().rss
                maps = len(watched.memory_maps(grouped=False))
        assert watched.num_fds() <= fds + 2
        assert len(watched.memory_maps(grouped=False)) <= maps + 8
        assert watched.memory_info().rss <= size + SLACK_BYTES
    finally:
        listener.ranks.close()
        attachment.close()
        model.close()


def _attached(listener: Listener) -> bool:
    return any(isinstance(event, DaemonReady) and event.attached for event in listener.events)
