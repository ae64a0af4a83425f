"""The envelope around every message, and the base of every message.

Schema rules: fields are never renamed, retyped or reordered in meaning; a new field has a default;
an unknown message type is counted, logged and dropped. Anything else is a new protocol version.
"""

import msgspec

#: Version of the wire format. History:
#: 1  first version.
PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of every message body. The tag on the wire is the class name."""

    #: Scheduler step that the message is about; 0 if about none.
    step: int = 0


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every message carries beside its body.

    The body is encoded separately (``msgspec.Raw``), so that a receiver can read the envelope of a
    message whose type it does not know.
    """

    #: ``PROTOCOL_VERSION`` of the sender.
    version: int
    #: vLLM's engine id; empty for a status client.
    engine: str
    #: Rank of the engine that this conversation is about.
    rank: int
    #: Which side of the engine speaks or is spoken to: ``model``, ``scheduler`` or ``status``.
    role: str
    #: Incarnation of the sender.
    epoch: int
    #: Incarnation of the receiver as far as the sender knows; 0: not known yet. A receiver that
    #: finds another incarnation's number here answers ``Refused`` and expects a new handshake.
    peer_epoch: int = 0
    #: Counts the messages of this sender to this receiver from 1, without gaps.
    seq: int
    #: Highest sequence number received in order from the receiver.
    ack: int = 0
    #: What made the sender say this: ``<log name>:<record number>`` of its event log.
    cause: str = ""
    #: The encoded body, one of the tagged unions of this package.
    body: msgspec.Raw
