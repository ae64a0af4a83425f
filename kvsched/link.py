"""One DEALER socket to one daemon: what both sides of vLLM talk through.

Threading: a link belongs to the thread that made it. Nothing here blocks unless a time is given.

A link survives its daemon: libzmq reconnects in the background. A new conversation (after a
restart, a sequence gap, or ``Refused(resync)``) is a *new socket* with a new identity, so nothing
queued for the old one can arrive in it.
"""

import enum
import logging
import math
import os
import select
import signal
import socket
import struct
from collections.abc import Iterator
from typing import cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvcommon.channel import Channel, Reception
from kvcommon.errors import RemoteProtocolError
from kvcommon.ids import EngineId, Epoch
from kvcommon.messages import (
    PROTOCOL_VERSION,
    Envelope,
    FromDaemon,
    Message,
    Refused,
    decode_from_daemon,
)
from kvcommon.messages.codec import decode_envelope

logger = logging.getLogger("vllm.kvferry.link")

#: Messages queued towards a daemon that is not there; more are refused (``send`` says False).
SEND_HIGH_WATER = 1000
#: Messages queued from a daemon while nobody reads; the daemon holds back long before this.
RECEIVE_HIGH_WATER = 10_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1000
_MONITORED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED


class LinkChange(enum.Enum):
    """What happened to the connection below a link."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    #: A sequence gap or a message of another incarnation: the conversation must be reopened.
    BROKEN = "broken"


class DaemonLink:
    """A conversation with one daemon about one rank, in one role."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, rank: int, role: str
    ) -> None:
        """Remember where to connect; ``open`` connects."""
        self._context = context
        self._endpoint = endpoint
        self._rank = rank
        self._role = role
        self._opened = 0
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._channel: Channel | None = None
        #: Messages dropped because they made no sense.
        self.num_bad = 0
        #: Process at the other end of a Unix socket, as the kernel says; 0: not known.
        self.peer_pid = 0
        #: ``cause`` of the last received envelope.
        self.last_cause = ""

    @property
    def endpoint(self) -> str:
        """Where the daemon is, or should be."""
        return self._endpoint

    @property
    def daemon_epoch(self) -> int:
        """Incarnation of the daemon in this conversation; 0 before its first message."""
        return self._channel.peer_epoch if self._channel is not None else 0

    def open(self, engine: EngineId, epoch: Epoch) -> None:
        """Begin a new conversation: a fresh socket, sequence numbers from 1."""
        self.close()
        self._opened += 1
        self._channel = Channel(engine, self._rank, self._role, epoch)
        socket = self._context.socket(zmq.DEALER)
        identity = f"{engine}#{self._rank}/{self._role}/{epoch:x}/{self._opened}"
        socket.setsockopt(zmq.IDENTITY, identity.encode()[:255])
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._monitor = socket.get_monitor_socket(_MONITORED)
        self._monitor.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        self._socket = socket

    def send(self, body: Message, cause: str = "") -> bool:
        """Queue a message. False: the link is closed or its queue is full; nothing was sent."""
        if self._socket is None or self._channel is None:
            return False
        if not _events(self._socket) & zmq.POLLOUT:
            return False
        self._socket.send(self._channel.stamp(body, cause), zmq.NOBLOCK)
        return True

    def receive(self, timeout_ms: float = 0) -> "FromDaemon | LinkChange | None":
        """Return the next message, or what broke; None if there is nothing within the time."""
        if self._socket is None or self._channel is None:
            return None
        if timeout_ms > 0 and not self._socket.poll(math.ceil(timeout_ms)):
            return None
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                envelope = decode_envelope(frame)
                if envelope.version != PROTOCOL_VERSION:
                    return _refusal(envelope)
                reception = self._channel.accept(envelope)
                if reception is Reception.DUPLICATE:
                    continue
                if reception is not Reception.OK:
                    return LinkChange.BROKEN
                self.last_cause = envelope.cause
                return decode_from_daemon(envelope)
            except RemoteProtocolError as error:
                self.num_bad += 1
                logger.warning("kvferry: dropped a message of %s: %s", self._endpoint, error)

    def changes(self) -> Iterator[LinkChange]:
        """Yield what happened to the connection since the last call."""
        while self._monitor is not None and _events(self._monitor) & zmq.POLLIN:
            message = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            event = message["event"]
            if event == zmq.EVENT_CONNECTED:
                self.peer_pid = _peer_pid(int(message["value"]))
                yield LinkChange.CONNECTED
            elif event == zmq.EVENT_DISCONNECTED:
                yield LinkChange.DISCONNECTED

    def wait(self, timeout_ms: float, wake_fd: int = -1) -> bool:
        """Wait until a message or a change is there, or ``wake_fd`` (if given) is readable.

        False: the time ran out.
        """
        if self._socket is None or self._monitor is None:
            return False
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        if wake_fd >= 0:
            poller.register(wake_fd, zmq.POLLIN)
        return bool(poller.poll(math.ceil(timeout_ms)))

    def close(self) -> None:
        """End the conversation; queued messages are dropped."""
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = self._channel = None


def _peer_pid(descriptor: int) -> int:
    """Who listens at the other end of a connection, as the kernel says; 0: not known."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.family != socket.AF_UNIX:
                return 0
            credentials = copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError:
        # Not a socket any more: the connection has gone already.
        return 0
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def _refusal(envelope: Envelope) -> Refused:
    """Read what a daemon of another protocol version says: only why it refuses us.

    Raises:
        RemoteProtocolError: it says something else.
    """
    body = decode_from_daemon(envelope)
    if not isinstance(body, Refused):
        raise RemoteProtocolError(
            f"{type(body).__name__} of protocol version {envelope.version}, not {PROTOCOL_VERSION}"
        )
    return body


def _events(socket: "zmq.Socket[bytes]") -> int:
    """What the socket is ready for, without the cost of a poller."""
    return cast("int", socket.getsockopt(zmq.EVENTS))


class ProcessWatch:
    """Tells whether a process of this host still exists, without a system call per question
    unless asked (pidfd; a reused pid cannot fool it)."""

    def __init__(self, pid: int) -> None:
        """Watch ``pid``; 0 or one that cannot be watched is never known to be dead."""
        self._fd = -1
        self._gone = False
        if pid > 0:
            try:
                self._fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone = True
            except OSError:
                logger.warning("kvferry: cannot watch process %d; its death goes unseen", pid)

    def is_dead(self) -> bool:
        """True once the process has certainly ended."""
        if self._fd >= 0 and not self._gone:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            self._gone = bool(poll.poll(0))
        return self._gone

    def kill(self) -> str:
        """Kill the process. Returns why that cannot be done; empty if it is done, or it is dead.

        It goes by the descriptor of exactly this process, never by its number.
        """
        if self._gone:
            return ""
        if self._fd < 0:
            return "its process is not known here"
        try:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        except ProcessLookupError:
            return ""
        except OSError as error:
            return f"it may not be killed ({error.strerror})"
        return ""

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
