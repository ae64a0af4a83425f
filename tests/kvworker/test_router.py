"""The socket: bounds, unreachable peers, frames that are not one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvcommon.errors import ConfigError
from kvworker.router import MAX_MESSAGE_BYTES, Incoming, Router

Context = zmq.Context[zmq.Socket[bytes]]
PATIENCE_MS = 10_000


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.term()


@pytest.fixture
def router(context: Context) -> Iterator[Router]:
    made = Router(context)
    made.bind(["inproc://r"])
    yield made
    made.close()


@pytest.fixture
def peer(context: Context) -> Iterator["zmq.Socket[bytes]"]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"peer")
    socket.connect("inproc://r")
    yield socket
    socket.close(linger=0)


def read(router: Router, limit: int = 100) -> list[Incoming]:
    assert router.socket.poll(PATIENCE_MS)
    return list(router.receive(limit))


def test_one_frame_comes_with_its_sender(router: Router, peer: "zmq.Socket[bytes]") -> None:
    assert list(router.receive(10)) == []
    peer.send(b"hello")
    assert read(router) == [Incoming(b"peer", b"hello")]


@pytest.mark.parametrize("num_frames", [2, 3, 50])
def test_other_numbers_of_frames_are_marked(
    router: Router, peer: "zmq.Socket[bytes]", num_frames: int
) -> None:
    peer.send_multipart([b"x"] * num_frames)
    peer.send(b"fine")
    assert read(router) == [Incoming(b"peer", None), Incoming(b"peer", b"fine")]


def test_reads_no_more_than_asked(router: Router, peer: "zmq.Socket[bytes]") -> None:
    for number in range(5):
        peer.send(b"%d" % number)
    assert [message.frame for message in read(router, 3)] == [b"0", b"1", b"2"]
    assert [message.frame for message in router.receive(3)] == [b"3", b"4"]


def test_sends_to_whom_it_heard(router: Router, peer: "zmq.Socket[bytes]") -> None:
    peer.send(b"hello")
    read(router)
    assert router.send(b"peer", b"welcome") == ""
    assert peer.poll(PATIENCE_MS)
    assert peer.recv() == b"welcome"


def test_unreachable_peer_is_reported(router: Router) -> None:
    assert "gone" in router.send(b"nobody", b"welcome")


def test_peer_that_does_not_read_is_reported(router: Router, peer: "zmq.Socket[bytes]") -> None:
    peer.send(b"hello")
    read(router)
    problem, sent = "", 0
    while not problem and sent < 100_000:
        problem = router.send(b"peer", b"x")
        sent += 1
    assert "does not read" in problem


def test_options_are_set(router: Router) -> None:
    socket = router.socket
    assert socket.getsockopt(zmq.LINGER) == 0
    assert socket.getsockopt(zmq.MAXMSGSIZE) == MAX_MESSAGE_BYTES
    assert int(socket.getsockopt(zmq.SNDHWM)) > 0
    assert int(socket.getsockopt(zmq.HEARTBEAT_TIMEOUT)) > 0


def test_socket_file_is_ours_alone(context: Context, tmp_path: Path) -> None:
    router = Router(context)
    router.bind([f"ipc://{tmp_path}/s", "inproc://also"])
    status = (tmp_path / "s").stat()
    assert status.st_mode & 0o077 == 0
    assert status.st_uid == os.getuid()
    router.close()
    router.close()


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "nonsense", "ipc:///no/such/directory/s"]
)
def test_unusable_endpoint_is_a_configuration_error(context: Context, endpoint: str) -> None:
    router = Router(context)
    with pytest.raises(ConfigError):
        router.bind([endpoint])
    router.close()


def test_loopback_tcp_may_be_served(context: Context) -> None:
    router = Router(context)
    router.bind(["tcp://127.0.0.1:*"])
    router.close()
