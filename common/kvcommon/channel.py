"""One conversation between two processes: sequence numbers, acknowledgements, incarnations.

Pure bookkeeping, the same on both sides: no socket, no clock. A ``Channel`` is one end of one
conversation. It numbers what goes out, and says of what comes in whether it may be acted upon.

Duties of the owner:

- Act on a message only if ``accept`` says ``OK``; drop a ``DUPLICATE``.
- After ``GAP`` or ``STALE`` the conversation is broken: nothing that was said since the last
  ``OK`` is known to have arrived. The side that opens conversations (model, scheduler) calls
  ``reset()`` and says ``Attach`` or ``Hello`` again as message 1. The daemon answers ``refusal``
  and waits for that; it may forget the channel at once.
- A refusal of a daemon with another protocol version is read before ``accept``: look at
  ``Envelope.version`` first.

``reset()`` on the opening side suffices: message 1 tells the other side to begin again.
"""

import enum

from kvcommon.messages.base import PROTOCOL_VERSION, Envelope, Message
from kvcommon.messages.codec import encode, encode_body


class Reception(enum.Enum):
    """What to do with an incoming message."""

    #: The next one: act on it.
    OK = "ok"
    #: Already received: drop it.
    DUPLICATE = "duplicate"
    #: A message before this one is missing: resynchronise.
    GAP = "gap"
    #: Of or for another incarnation of one side, or of an earlier conversation: resynchronise.
    STALE = "stale"


class Channel:
    """One end of a conversation. Owned by one thread.

    ``engine``, ``rank`` and ``role`` name the conversation the same way on both ends; ``epoch`` is
    the incarnation of this end.
    """

    def __init__(self, engine: str, rank: int, role: str, epoch: int) -> None:
        self.engine = engine
        self.rank = rank
        self.role = role
        self.epoch = epoch
        #: Incarnation of the other end; 0 until its first message (or ``reset``) tells it.
        self.peer_epoch = 0
        #: Number of the last message stamped.
        self.sent = 0
        #: Number of the last message accepted; everything before it was accepted too.
        self.received = 0
        #: The other end has accepted everything up to here. Never above ``sent``.
        self.acked = 0

    @property
    def unacked(self) -> int:
        """How many of our messages the other end has not said to have received."""
        return self.sent - self.acked

    def stamp(self, body: Message, cause: str = "") -> bytes:
        """Encode the next message of ours, acknowledging what was accepted so far.

        The number is spent: a caller that then cannot send the bytes has made a gap.
        """
        self.sent += 1
        return encode(
            Envelope(
                version=PROTOCOL_VERSION,
                engine=self.engine,
                rank=self.rank,
                role=self.role,
                epoch=self.epoch,
                peer_epoch=self.peer_epoch,
                seq=self.sent,
                ack=self.received,
                cause=cause,
                body=encode_body(body),
            )
        )

    def accept(self, envelope: Envelope) -> Reception:
        """Classify an incoming message, and count it if it is ``OK``.

        Only ``OK`` and ``DUPLICATE`` change anything (the acknowledgement).
        """
        if envelope.peer_epoch not in (0, self.epoch) or envelope.ack > self.sent:
            return Reception.STALE
        if self.peer_epoch not in (0, envelope.epoch) or envelope.epoch == 0:
            return Reception.STALE
        if envelope.seq > self.received + 1:
            return Reception.GAP
        self.acked = max(self.acked, envelope.ack)
        if envelope.seq <= self.received:
            return Reception.DUPLICATE
        self.peer_epoch = envelope.epoch
        self.received = envelope.seq
        return Reception.OK

    def reset(self, peer_epoch: int = 0) -> None:
        """Begin the conversation again, in both directions, from message 1.

        ``peer_epoch`` 0: whoever answers.
        """
        self.peer_epoch = peer_epoch
        self.sent = self.received = self.acked = 0


def refusal(envelope: Envelope, epoch: int, body: Message, cause: str = "") -> bytes:
    """Encode an answer to a message that belongs to no conversation of ours.

    It carries the number that the sender expects next, so its ``Channel`` accepts it if it knows
    this incarnation (``epoch``), and finds it ``STALE``, which is as good, if it knows another.
    """
    return encode(
        Envelope(
            version=PROTOCOL_VERSION,
            engine=envelope.engine,
            rank=envelope.rank,
            role=envelope.role,
            epoch=epoch,
            peer_epoch=envelope.epoch,
            seq=envelope.ack + 1,
            cause=cause,
            body=encode_body(body),
        )
    )
