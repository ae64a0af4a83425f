"""The daemon's side of every conversation: what comes in, what goes out, who is gone.

Sits between the socket and the shell's loop; owned by the same thread. Nothing a peer sends is
fatal: it is counted, logged at a bounded rate, and dropped or refused.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Union, get_args

from kvcommon.channel import refusal
from kvcommon.errors import RemoteProtocolError
from kvcommon.messages import (
    PROTOCOL_VERSION,
    Attach,
    Envelope,
    Heartbeat,
    JobsEnded,
    Message,
    ModelToDaemon,
    Refused,
    SchedulerToDaemon,
    StatusRequest,
    ToDaemon,
    decode_to_daemon,
)
from kvcommon.messages.codec import decode_envelope
from kvworker.limits import RateLimit
from kvworker.peers import Admission, Peer, PeerKey, PeerTable, Role
from kvworker.router import Router

logger = logging.getLogger("kvferry.worker")

#: With so many messages unacknowledged a peer gets heartbeats rarely: it may be idle for days.
_UNACKED_LIMIT = 32
_RARELY = 60
#: Messages kept for a model side whose data conversation has not begun.
_MAX_PENDING = 256
#: A peer is told at most so often that its conversation does not exist.
_REFUSE_EVERY_NS = 500_000_000
_COMPLAIN_EVERY_NS = 5_000_000_000
#: What each role may say; ``Attach`` opens the conversation ``model`` and no other.
_UNDERSTOOD: dict[Role, tuple[type, ...]] = {
    Role.MODEL: get_args(ModelToDaemon),
    Role.DATA: tuple(kind for kind in get_args(ModelToDaemon) if kind is not Attach),
    Role.SCHEDULER: get_args(SchedulerToDaemon),
}


class Said(NamedTuple):
    """A message to act upon."""

    peer: Peer
    body: ToDaemon
    cause: str
    #: It began the conversation.
    opened: bool


class Lost(NamedTuple):
    """A conversation that is no more."""

    key: PeerKey
    epoch: int
    reason: str


class Asked(NamedTuple):
    """A status request; the answer goes to ``Conversations.answer``."""

    identity: bytes
    envelope: Envelope


Heard = Union[Said, Lost, Asked]


class Conversations:
    """All conversations over one router."""

    def __init__(self, router: Router, epoch: int) -> None:
        self._router = router
        self._epoch = epoch
        self._table = PeerTable(epoch)
        #: What could not be sent, to be reported by ``lost``.
        self._lost: deque[Lost] = deque()
        self._pending: dict[str, list[tuple[Message, str]]] = {}
        self._refusals = RateLimit(_REFUSE_EVERY_NS)
        self._complaints = RateLimit(_COMPLAIN_EVERY_NS)
        #: Counts by metric name (``kvworker.metrics``).
        self.counts: Counter[str] = Counter()

    @property
    def peers(self) -> PeerTable:
        """The open conversations."""
        return self._table

    def receive(self, limit: int, now_ns: int) -> Iterator[Heard]:
        """Yield what waiting messages (at most ``limit``) mean to the shell."""
        for identity, frame in self._router.receive(limit):
            self.counts["kvferry_worker_messages_received_total"] += 1
            if frame is None:
                self._drop(identity, "not one frame", now_ns)
                continue
            try:
                envelope = decode_envelope(frame)
            except RemoteProtocolError as error:
                self._drop(identity, str(error), now_ns)
                continue
            yield from self._place(identity, envelope, now_ns)

    def _place(self, identity: bytes, envelope: Envelope, now_ns: int) -> Iterator[Heard]:
        """Find out what one well-formed envelope means."""
        if envelope.version != PROTOCOL_VERSION:
            self._drop(identity, f"protocol version {envelope.version}", now_ns)
            self._refuse(identity, envelope, _wrong_version(envelope), now_ns)
            return
        body: ToDaemon | None = None
        try:
            role = Role(envelope.role)
            body = decode_to_daemon(envelope)
        except ValueError:
            self._drop(identity, f"unknown role {envelope.role[:20]!r}", now_ns)
            return
        except RemoteProtocolError as error:
            # Its number still counts, or the next message would be taken for a gap.
            self._drop(identity, str(error), now_ns)
        if role is Role.STATUS or isinstance(body, StatusRequest):
            if isinstance(body, StatusRequest):
                yield Asked(identity, envelope)
            return
        admission = self._table.admit(identity, envelope, body, role, now_ns)
        yield from self._admitted(identity, envelope, body, admission, now_ns)

    def _admitted(
        self,
        identity: bytes,
        envelope: Envelope,
        body: ToDaemon | None,
        admission: Admission,
        now_ns: int,
    ) -> Iterator[Heard]:
        if admission.refusal:
            self.counts["kvferry_worker_messages_refused_total"] += 1
            again = Refused(reason=admission.refusal, resync=True)
            if admission.broken is None:
                self._refuse(identity, envelope, again, now_ns)
            else:
                self._router.send(identity, admission.broken.channel.stamp(again))
                yield from self._break(admission.broken, admission.refusal)
        peer = admission.peer
        if peer is None:
            return
        if admission.opened:
            self._opened(peer)
        if body is None:
            return
        if not isinstance(body, _UNDERSTOOD[peer.key.role]):
            self._drop(identity, f"{type(body).__name__} as {peer.key.role.value}", now_ns)
            return
        if isinstance(body, Attach):
            peer.lease_ns = max(0, body.lease_ms) * 1_000_000
        yield Said(peer, body, envelope.cause, admission.opened)

    def _opened(self, peer: Peer) -> None:
        """A conversation began: drop what belongs to an older incarnation, send what waited."""
        engine, role = peer.key
        if role is Role.MODEL:
            data = self._table.get(engine, Role.DATA)
            if data is not None and data.epoch != peer.epoch:
                self._table.forget(data)
                self._pending.pop(engine, None)
        if role is Role.DATA:
            for body, cause in self._pending.pop(engine, ()):
                self._send(peer, body, cause)

    def _break(self, peer: Peer, reason: str) -> Iterator[Lost]:
        """End a conversation that is out of step, with the model side's other one if it has one."""
        self.counts["kvferry_worker_conversations_broken_total"] += 1
        yield Lost(peer.key.of_side, peer.epoch, reason)
        other = {Role.MODEL: Role.DATA, Role.DATA: Role.MODEL}.get(peer.key.role)
        twin = self._table.get(peer.key.engine, other) if other is not None else None
        if twin is not None:
            self._table.forget(twin)
            again = Refused(reason=f"{peer.key.role.value}: {reason}", resync=True)
            self._router.send(twin.identity, twin.channel.stamp(again))

    def send(self, engine: str, role: Role, body: Message, cause: str, now_ns: int) -> None:
        """Say something to one side of an engine; to nobody if that side is not there.

        What fails is reported by ``lost``. Ended jobs for a model side whose data conversation has
        not begun wait for it.
        """
        if role is Role.MODEL and isinstance(body, JobsEnded):
            role = Role.DATA
        peer = self._table.get(engine, role)
        if peer is not None:
            peer.said_ns = now_ns
            self._send(peer, body, cause)
            return
        model = self._table.get(engine, Role.MODEL) if role is Role.DATA else None
        if model is None:
            self.counts["kvferry_worker_messages_unsent_total"] += 1
            return
        waiting = self._pending.setdefault(engine, [])
        waiting.append((body, cause))
        if len(waiting) > _MAX_PENDING:
            self.drop(model.key, "its data conversation does not begin")

    def _send(self, peer: Peer, body: Message, cause: str) -> None:
        problem = self._router.send(peer.identity, peer.channel.stamp(body, cause))
        if not problem:
            self.counts["kvferry_worker_messages_sent_total"] += 1
            return
        self.counts["kvferry_worker_messages_unsent_total"] += 1
        self._table.forget(peer)
        self._lost.extend(self._break(peer, problem))

    def answer(self, asked: Asked, body: Message) -> None:
        """Answer a status request."""
        self._router.send(asked.identity, refusal(asked.envelope, self._epoch, body))

    def drop(self, key: PeerKey, reason: str) -> None:
        """End the conversations of a side whose process ended; reported by ``lost``."""
        peer = self._table.get(key.engine, key.role)
        if peer is not None:
            self._table.forget(peer)
            self._lost.extend(self._break(peer, reason))

    def lost(self) -> Iterator[Lost]:
        """Yield what was lost since the last call."""
        while self._lost:
            yield self._lost.popleft()

    def tick(self, now_ns: int, heartbeat_ns: int, watched: "AbstractSet[PeerKey]") -> None:
        """Send the heartbeats that are due, and give up on those who fell silent.

        ``watched``: those whose death is seen otherwise; they get no heartbeat while they leave
        many messages unacknowledged.
        """
        for peer in self._table:
            interval_ns = heartbeat_ns
            if peer.channel.unacked >= _UNACKED_LIMIT:
                if peer.key.of_side in watched:
                    continue
                interval_ns *= _RARELY
            if now_ns - peer.said_ns >= interval_ns:
                self.send(*peer.key, Heartbeat(), "", now_ns)
        for peer in self._table.silent(now_ns):
            self.drop(peer.key, "nothing was heard for the length of its lease")
        engines = {peer.key.engine for peer in self._table}
        for engine in [engine for engine in self._pending if engine not in engines]:
            del self._pending[engine]

    def _drop(self, identity: bytes, reason: str, now_ns: int) -> None:
        self.counts["kvferry_worker_messages_dropped_total"] += 1
        if self._complaints.allows(b"", now_ns):
            logger.warning(
                "dropped a message of peer %s: %s (%d dropped so far)",
                identity.hex()[:32],
                reason,
                self.counts["kvferry_worker_messages_dropped_total"],
            )

    def _refuse(self, identity: bytes, envelope: Envelope, body: Refused, now_ns: int) -> None:
        if self._refusals.allows(identity, now_ns):
            self._router.send(identity, refusal(envelope, self._epoch, body))


def _wrong_version(envelope: Envelope) -> Refused:
    return Refused(
        reason=f"protocol version {envelope.version} is not {PROTOCOL_VERSION}, the daemon's",
        remedy="run the same release of kvferry on both sides, or restart the older one",
    )
