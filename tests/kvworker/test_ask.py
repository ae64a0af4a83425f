"""Asking a daemon: every way in which there is no answer is said in one line."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvcommon.errors import ConfigError
from kvcommon.messages import Envelope, Heartbeat, Message, Status, encode
from kvcommon.messages.codec import encode_body
from kvworker.ask import ask_status

Socket = zmq.Socket[bytes]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@contextlib.contextmanager
def impostor(endpoint: str, frame: bytes) -> Iterator[None]:
    """Somebody listens where a daemon should, and answers the first message with this."""
    context: zmq.Context[Socket] = zmq.Context()
    with context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.bind(endpoint)

        def answer() -> None:
            identity, _ = socket.recv_multipart()
            socket.send_multipart((identity, frame))

        thread = threading.Thread(target=answer)
        thread.start()
        yield
        thread.join()
    context.term()


def envelope(body: Message, version: int = 1) -> bytes:
    return encode(
        Envelope(
            version=version,
            engine="",
            rank=0,
            role="status",
            epoch=5,
            seq=1,
            body=encode_body(body),
        )
    )


STATUS = Status(pid=3, device="cpu:0", store="memory")


def test_answer(endpoint: str) -> None:
    with impostor(endpoint, envelope(STATUS)):
        assert ask_status(endpoint, 10) == STATUS


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"junk", "not a kvferry daemon"),
        (envelope(STATUS, version=42), "42"),
        (envelope(Heartbeat()), "Heartbeat"),
    ],
)
def test_wrong_answer(endpoint: str, frame: bytes, text: str) -> None:
    with impostor(endpoint, frame), pytest.raises(ConfigError, match=text):
        ask_status(endpoint, 10)


def test_no_answer(endpoint: str) -> None:
    context: zmq.Context[Socket] = zmq.Context()
    with context.socket(zmq.ROUTER) as silent:
        silent.bind(endpoint)
        with pytest.raises(ConfigError, match=r"does not answer within 0\.1 s"):
            ask_status(endpoint, 0.1)
    context.term()


def test_no_daemon(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="no daemon serves"):
        ask_status(endpoint, 10)
