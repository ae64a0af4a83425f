"""The daemon's one ROUTER socket: set up, read and written by a single thread.

Identities are opaque bytes. Reading and writing never wait; what cannot be sent is reported, never
queued here: the socket's own high-water marks are the bound.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq

from kvcommon.errors import ConfigError

logger = logging.getLogger("kvferry.worker")

#: Messages per peer that wait in libzmq, each way.
SEND_HIGH_WATER = 4096
RECEIVE_HIGH_WATER = 4096
#: A larger frame ends its connection. An ``Attach`` of a thousand layers is below 1 MiB.
MAX_MESSAGE_BYTES = 64 << 20
#: How long a peer's ZeroMQ may stay silent before its connection counts as dead.
HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS = 2000, 10_000
_IPC = "ipc://"
_LOOPBACK = ("tcp://127.", "tcp://[::1]:", "tcp://localhost:")
#: Identity and payload.
_NUM_FRAMES = 2


class Incoming(NamedTuple):
    """One message as it came from the socket. ``frame`` is None if it had not exactly one part."""

    identity: bytes
    frame: bytes | None


class Router:
    """A bound ROUTER socket."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """The socket itself, for polling."""
        assert self._socket is not None, "bind first"
        return self._socket

    def bind(self, endpoints: Sequence[str]) -> None:
        """Make the socket and bind every endpoint.

        Raises:
            ConfigError: an endpoint cannot be bound, or is TCP beyond loopback.
        """
        socket = self._context.socket(zmq.ROUTER)
        self._socket = socket
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        # An unreachable peer is an error, not silence; a peer that reconnects keeps its name.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Only our own user may connect, whatever the mode of the directory.
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        for endpoint in endpoints:
            if endpoint.startswith("tcp://") and not endpoint.startswith(_LOOPBACK):
                raise ConfigError(
                    f"{endpoint}: TCP is served on loopback only; use tcp://127.0.0.1:PORT or ipc://"
                )
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot listen on {endpoint}: {error}") from None
            if endpoint.startswith(_IPC):
                Path(endpoint[len(_IPC) :]).chmod(0o600)

    def receive(self, limit: int) -> Iterator[Incoming]:
        """Yield at most ``limit`` waiting messages."""
        socket = self.socket
        for _ in range(limit):
            try:
                identity = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame, num_frames = b"", 1
            # Read part by part, so that a message of a million parts is never held at once.
            while socket.getsockopt(zmq.RCVMORE):
                part = socket.recv(zmq.NOBLOCK)
                num_frames += 1
                if num_frames <= _NUM_FRAMES:
                    frame = part
            yield Incoming(identity, frame if num_frames == _NUM_FRAMES else None)

    def send(self, identity: bytes, frame: bytes) -> str:
        """Send without waiting. Returns why it was not sent; empty if it was."""
        try:
            self.socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.Again:
            return "it does not read its messages"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "its connection is gone"
        return ""

    def close(self) -> None:
        """Close the socket at once. Idempotent."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
