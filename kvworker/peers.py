"""Who the daemon talks to: one record per conversation.

An engine rank has up to three conversations, told apart by the envelope's role: ``model`` (the
model side's control messages), ``data`` (its per-step messages, on a socket of their own) and
``scheduler``. A conversation begins with message 1: ``Attach`` on ``model``, ``Hello`` on
``scheduler``, anything on ``data`` once the same incarnation has said ``Attach``. Until then, and
after it broke, its messages are refused, which makes the other side begin again.

No socket and no clock here: the shell passes what it read and when.
"""

import enum
from collections.abc import Iterator
from typing import NamedTuple

from kvcommon.channel import Channel, Reception
from kvcommon.ids import EngineId, EngineKey, engine_key
from kvcommon.messages import Attach, Envelope, Hello, ToDaemon

#: Conversations at once; more are refused. 80 engines of one rank on one device is far too many.
MAX_PEERS = 256
_NS_PER_MS = 1_000_000


class Role(str, enum.Enum):
    """What a conversation is for: the envelope's ``role``."""

    MODEL = "model"
    DATA = "data"
    SCHEDULER = "scheduler"
    STATUS = "status"

    @property
    def side(self) -> str:
        """The side of the engine as the core names it."""
        return "scheduler" if self is Role.SCHEDULER else "model"


class PeerKey(NamedTuple):
    """Names a conversation, whatever incarnation leads it."""

    engine: EngineKey
    role: Role

    @property
    def of_side(self) -> "PeerKey":
        """The side's first conversation: both of a model side live and die under its name."""
        return PeerKey(self.engine, Role.MODEL) if self.role is Role.DATA else self


class Peer:
    """One open conversation."""

    def __init__(
        self, key: PeerKey, identity: bytes, channel: Channel, now_ns: int, lease_ms: int = 0
    ) -> None:
        self.key = key
        #: Where ZeroMQ delivers; opaque.
        self.identity = identity
        self.channel = channel
        self.heard_ns = now_ns
        self.said_ns = now_ns
        #: Silence after which it counts as lost; 0: never.
        self.lease_ns = lease_ms * _NS_PER_MS

    @property
    def epoch(self) -> int:
        """Incarnation of the other end."""
        return self.channel.peer_epoch


class Admission(NamedTuple):
    """What became of an incoming envelope."""

    #: Whom it is from, if it may be acted upon.
    peer: Peer | None = None
    #: It began a conversation (a new one, or one again).
    opened: bool = False
    #: A repetition of what was acted upon: say and do nothing.
    duplicate: bool = False
    #: Conversation that it has broken, now forgotten.
    broken: Peer | None = None
    #: Why it is refused, if it is.
    refusal: str = ""


class PeerTable:
    """All open conversations of a daemon."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._peers: dict[PeerKey, Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        """Iterate over a copy: the table may change meanwhile."""
        return iter(tuple(self._peers.values()))

    def __len__(self) -> int:
        """Number of open conversations."""
        return len(self._peers)

    def get(self, engine: str, role: Role) -> Peer | None:
        """Return the open conversation of this engine rank in this role, if there is one."""
        return self._peers.get(PeerKey(EngineKey(engine), role))

    def forget(self, peer: Peer) -> None:
        """End a conversation on our side. Idempotent."""
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]

    def admit(
        self, identity: bytes, envelope: Envelope, body: ToDaemon | None, role: Role, now_ns: int
    ) -> Admission:
        """Place an incoming message in its conversation.

        ``body`` is None if it could not be decoded: its number counts all the same.
        """
        key = PeerKey(engine_key(EngineId(envelope.engine), envelope.rank), role)
        peer = self._peers.get(key)
        if envelope.seq == 1 and self._may_open(peer, key, identity, envelope, body):
            return self._open(key, identity, envelope, body, now_ns)
        if peer is None or peer.identity != identity or peer.epoch != envelope.epoch:
            return Admission(refusal=f"no open conversation: say {_opening(role)} first")
        reception = peer.channel.accept(envelope)
        if reception is Reception.OK:
            peer.heard_ns = now_ns
            return Admission(peer=peer)
        if reception is Reception.DUPLICATE:
            return Admission(duplicate=True)
        self.forget(peer)
        expected = peer.channel.received + 1
        return Admission(
            broken=peer,
            refusal=f"message {envelope.seq} came where {expected} was expected"
            if reception is Reception.GAP
            else "the message is of another conversation",
        )

    def _may_open(
        self,
        peer: Peer | None,
        key: PeerKey,
        identity: bytes,
        envelope: Envelope,
        body: ToDaemon | None,
    ) -> bool:
        """Say whether message 1 begins the conversation ``key``.

        Not if it repeats the one that has begun it: who begins again takes another identity.
        """
        if peer is not None and (peer.identity, peer.epoch) == (identity, envelope.epoch):
            return False
        if key.role is Role.MODEL:
            return isinstance(body, Attach)
        if key.role is Role.SCHEDULER:
            return isinstance(body, Hello)
        model = self._peers.get(PeerKey(key.engine, Role.MODEL))
        return model is not None and model.epoch == envelope.epoch

    def _open(
        self,
        key: PeerKey,
        identity: bytes,
        envelope: Envelope,
        body: ToDaemon | None,
        now_ns: int,
    ) -> Admission:
        """Begin a conversation, in the place of an older one of the same name."""
        if key not in self._peers and len(self._peers) >= MAX_PEERS:
            return Admission(refusal=f"{MAX_PEERS} conversations are open, too many")
        channel = Channel(envelope.engine, envelope.rank, key.role.value, self._epoch)
        if channel.accept(envelope) is not Reception.OK:
            return Admission(refusal="it is meant for another incarnation of this daemon")
        lease_ms = body.lease_ms if isinstance(body, Attach) else 0
        peer = Peer(key, identity, channel, now_ns, max(0, lease_ms))
        self._peers[key] = peer
        return Admission(peer=peer, opened=True)

    def silent(self, now_ns: int) -> list[Peer]:
        """Model sides whose lease ended: nothing was heard on either of their conversations."""
        return [
            peer
            for peer in self._peers.values()
            if peer.lease_ns and now_ns - self._heard_ns(peer) > peer.lease_ns
        ]

    def _heard_ns(self, model: Peer) -> int:
        """When anything was last heard of this model side."""
        data = self._peers.get(PeerKey(model.key.engine, Role.DATA))
        return max(model.heard_ns, data.heard_ns if data is not None else 0)


def _opening(role: Role) -> str:
    """Name the message that begins a conversation."""
    return "Hello" if role is Role.SCHEDULER else "Attach"
