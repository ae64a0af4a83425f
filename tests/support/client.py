"""A small synchronous peer of a daemon, for tests: one DEALER socket, one conversation."""

from types import TracebackType
from typing import TypeVar

import zmq

from kvcommon.channel import Channel, Reception
from kvcommon.ids import new_epoch
from kvcommon.messages import Envelope, FromDaemon, Heartbeat, Message, decode_from_daemon
from kvcommon.messages.codec import decode_envelope

#: Nothing in a test takes so long unless it is broken.
PATIENCE_MS = 20_000
MessageT = TypeVar("MessageT", bound=Message)


class Client:
    """Speaks to a daemon as one role of one engine rank."""

    def __init__(  # noqa: PLR0917 (all but two are named where they are given)
        self,
        endpoint: str,
        role: str,
        engine: str = "e",
        rank: int = 0,
        epoch: int = 0,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        self.channel = Channel(engine, rank, role, epoch or new_epoch())
        self._owns_context = context is None
        self._context = zmq.Context() if context is None else context
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        #: Envelope of the last message heard.
        self.envelope: Envelope | None = None

    def __enter__(self) -> "Client":  # noqa: PYI034 (Self needs Python 3.11)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def say(self, body: Message, cause: str = "") -> None:
        """Send the next message."""
        self.socket.send(self.channel.stamp(body, cause))

    def skip(self, body: Message) -> None:
        """Lose a message: its number is spent, nothing is sent."""
        self.channel.stamp(body)

    def hear_anything(self, patience_ms: int = PATIENCE_MS) -> FromDaemon:
        """Return the next message whatever it is; it must fit the conversation."""
        assert self.socket.poll(patience_ms), "the daemon says nothing"
        self.envelope = decode_envelope(self.socket.recv())
        assert self.channel.accept(self.envelope) is Reception.OK
        return decode_from_daemon(self.envelope)

    def hear(self, kind: type[MessageT]) -> MessageT:
        """Return the next message that is no heartbeat; it must be of this kind."""
        while True:
            body = self.hear_anything()
            if isinstance(body, kind):
                return body
            assert isinstance(body, Heartbeat), f"expected {kind.__name__}, heard {body}"

    def close(self) -> None:
        """Leave without a word."""
        self.socket.close()
        if self._owns_context:
            self._context.term()
