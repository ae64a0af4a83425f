"""One conversation with a daemon: what is said is numbered, what is heard is checked."""

import time
from collections.abc import Iterator
from typing import Final

import zmq

from kvcommon.channel import Channel, Reception
from kvcommon.ids import EngineId, Epoch
from kvcommon.messages import FromDaemon, Heartbeat, Message, decode_from_daemon
from kvcommon.messages.codec import decode_envelope
from kvreplay.drive.errors import DriveError

_HEARTBEAT_S: Final = 1.0
#: Messages that wait to be sent or read; a daemon that lets more gather is stuck.
_HIGH_WATER: Final = 10_000


class Links:
    """All conversations of a run, polled together. Owned by one thread."""

    def __init__(self) -> None:
        """Start with none."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._links: dict[zmq.Socket[bytes], Link] = {}

    def open(self, endpoint: str, role: str, engine: str, rank: int, epoch: int) -> "Link":
        """Begin a conversation as one role of one rank of an engine."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.connect(endpoint)
        self._poller.register(socket, zmq.POLLIN)
        link = Link(socket, Channel(EngineId(engine), rank, role, Epoch(epoch)))
        self._links[socket] = link
        return link

    def hear(self, timeout_s: float) -> Iterator[tuple["Link", FromDaemon]]:
        """Yield what daemons say, waiting for the first word at most so long."""
        for link in self._links.values():
            link.beat()
        for socket, _ in self._poller.poll(max(0, round(timeout_s * 1000))):
            link = self._links[socket]
            for body in link.read():
                yield link, body

    def drop(self, link: "Link") -> None:
        """End a conversation without a word."""
        self._poller.unregister(link.socket)
        del self._links[link.socket]
        link.socket.close()

    def close(self) -> None:
        """End everything."""
        for link in list(self._links.values()):
            self.drop(link)
        self._context.term()


class Link:
    """One end of one conversation."""

    def __init__(self, socket: "zmq.Socket[bytes]", channel: Channel) -> None:
        """Take a connected socket."""
        self.socket = socket
        self.channel = channel
        self._said_s = time.monotonic()

    def say(self, body: Message) -> None:
        """Send the next message.

        Raises:
            DriveError: the daemon takes nothing any more.
        """
        try:
            self.socket.send(self.channel.stamp(body), zmq.NOBLOCK)
        except zmq.Again:
            raise DriveError("the daemon does not read what it is sent") from None
        self._said_s = time.monotonic()

    def beat(self) -> None:
        """Say that we are alive, if nothing else was said for a while."""
        if self.channel.sent and time.monotonic() - self._said_s > _HEARTBEAT_S:
            self.say(Heartbeat())

    def read(self) -> Iterator[FromDaemon]:
        """Yield what has arrived; heartbeats are taken in silently.

        Raises:
            DriveError: the conversation is out of step.
        """
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            envelope = decode_envelope(frame)
            reception = self.channel.accept(envelope)
            body = decode_from_daemon(envelope)
            if reception is Reception.DUPLICATE or isinstance(body, Heartbeat):
                continue
            if reception is not Reception.OK:
                where = f"{self.channel.role} of {self.channel.engine}#{self.channel.rank}"
                raise DriveError(f"the conversation of the {where} side is broken: {body}")
            yield body
