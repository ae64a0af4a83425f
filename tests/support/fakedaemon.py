"""A daemon that does exactly what a test tells it: misbehaviour that the real one does not show.

One ROUTER socket, owned by the test's own thread: nothing is answered unless the test says so.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec
import zmq

from kvcommon.channel import Channel
from kvcommon.ids import new_epoch
from kvcommon.messages import Attached, Envelope, Heartbeat, Message, ToDaemon, Welcome
from kvcommon.messages.base import PROTOCOL_VERSION
from kvcommon.messages.codec import decode_envelope, decode_to_daemon, encode

#: Nothing in a test takes so long unless it is broken.
PATIENCE_MS = 20_000
MessageT = TypeVar("MessageT", bound=Message)


class FakeDaemon:
    """Hears everything, says what it is told, to whoever spoke last in a role."""

    def __init__(self, *, bound: bool = True) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvf")
        self.endpoint = f"ipc://{Path(self._folder.name) / 'd.sock'}"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.epoch = new_epoch()
        #: Open conversations: socket identity → our end.
        self.channels: dict[bytes, Channel] = {}
        #: Who spoke last, by role.
        self.peers: dict[str, bytes] = {}
        #: Envelope of the last message heard.
        self.envelope: Envelope | None = None
        self.socket: zmq.Socket[bytes] | None = None
        if bound:
            self.start()

    def __enter__(self) -> "FakeDaemon":  # noqa: PYI034 (Self needs Python 3.11)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Be there, with a new epoch."""
        self.epoch = new_epoch()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.endpoint)

    def stop(self) -> None:
        """Be gone: connections end, conversations are forgotten."""
        if self.socket is not None:
            self.socket.close()
        self.socket = None
        self.channels.clear()
        self.peers.clear()

    def close(self) -> None:
        self.stop()
        # A test that failed has left sockets open; ``term`` would wait for them for ever.
        self.context.destroy(linger=0)
        self._folder.cleanup()

    def hear_anything(self, patience_ms: int = PATIENCE_MS) -> ToDaemon | None:
        """Return the next message; None if there is none in time."""
        assert self.socket is not None
        if not self.socket.poll(patience_ms):
            return None
        identity, frame = self.socket.recv_multipart()
        envelope = self.envelope = decode_envelope(frame)
        channel = self.channels.get(identity)
        if channel is None:
            channel = Channel(envelope.engine, envelope.rank, envelope.role, self.epoch)
            self.channels[identity] = channel
        channel.accept(envelope)
        self.peers[envelope.role] = identity
        return decode_to_daemon(envelope)

    def hear(self, kind: type[MessageT]) -> MessageT:
        """Return the next message that is no heartbeat; it must be of this kind."""
        while True:
            body = self.hear_anything()
            if isinstance(body, kind):
                return body
            assert isinstance(body, Heartbeat), f"expected {kind.__name__}, heard {body}"

    def silent(self) -> bool:
        """Nobody has said anything that is still unheard."""
        return self.hear_anything(0) is None

    def channel(self, role: str) -> Channel:
        """Our end of the newest conversation in a role."""
        return self.channels[self.peers[role]]

    def say(self, role: str, body: Message, cause: str = "") -> None:
        """Say the next message of a conversation."""
        self.say_frame(role, self.channel(role).stamp(body, cause))

    def skip(self, role: str, body: Message) -> None:
        """Lose a message: its number is spent, nothing is sent."""
        self.channel(role).stamp(body)

    def say_of_version(self, role: str, body: Message, version: int = PROTOCOL_VERSION + 1) -> None:
        """Say something as a daemon of another protocol version."""
        channel = self.channel(role)
        envelope = decode_envelope(channel.stamp(body))
        self.say_frame(role, encode(msgspec.structs.replace(envelope, version=version)))

    def say_of_unknown_type(self, role: str) -> None:
        """Say something well-formed whose type nobody knows."""
        envelope = decode_envelope(self.channel(role).stamp(Heartbeat()))
        body = msgspec.Raw(msgspec.msgpack.encode({"type": "Weather", "rain": True}))
        self.say_frame(role, encode(msgspec.structs.replace(envelope, body=body)))

    def say_frame(self, role: str, frame: bytes) -> None:
        """Send any bytes."""
        assert self.socket is not None
        self.socket.send_multipart([self.peers[role], frame])

    def welcome(self, *, attached: bool = True, pid: int = 0, event_log: str = "") -> None:
        """Answer ``Hello``."""
        self.say(
            "scheduler",
            Welcome(pid=pid, device="cpu:0", attached=attached, store="fake", event_log=event_log),
        )

    def attached(self, *differences: str) -> None:
        """Answer ``Attach`` (the page's answer is the test's part)."""
        self.say("model", Attached(pid=0, differences=differences))


def until(condition: Callable[[], bool], wait: Callable[[float], object]) -> None:
    """Call ``wait`` (for an event, bounded by its milliseconds) until the condition holds."""
    slices = PATIENCE_MS // 50
    for _ in range(slices):
        if condition():
            return
        wait(50)
    assert condition(), "it does not happen"
