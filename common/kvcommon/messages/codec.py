"""Encoding and decoding: msgpack, typed, one reused encoder and decoder per direction.

Decoding runs no code of the message and accepts only the types of the unions below.
"""

from typing import Union

import msgspec

from kvcommon.errors import RemoteProtocolError
from kvcommon.messages.base import Envelope, Message
from kvcommon.messages.daemon import (
    Attached,
    JobsEnded,
    LookupResult,
    PlanAck,
    Refused,
    Status,
    StoreHealth,
    Welcome,
)
from kvcommon.messages.model import Attach, CancelJobs, Detach, LayersComputed, StepBegun
from kvcommon.messages.scheduler import (
    Hello,
    Lookup,
    ReleaseLookup,
    ResetStore,
    StatusRequest,
    StepPlan,
    StepVerdict,
)
from kvcommon.messages.shared import Heartbeat

ModelToDaemon = Union[Attach, Detach, StepBegun, LayersComputed, CancelJobs, Heartbeat]
SchedulerToDaemon = Union[
    Hello, Lookup, StepPlan, StepVerdict, ReleaseLookup, ResetStore, Heartbeat
]
DaemonToModel = Union[Attached, Refused, JobsEnded, Heartbeat]
DaemonToScheduler = Union[
    Welcome, Refused, LookupResult, PlanAck, JobsEnded, StoreHealth, Heartbeat
]
ToDaemon = Union[ModelToDaemon, SchedulerToDaemon, StatusRequest]
FromDaemon = Union[DaemonToModel, DaemonToScheduler, Status]

_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(Envelope)
_to_daemon: "msgspec.msgpack.Decoder[ToDaemon]" = msgspec.msgpack.Decoder(ToDaemon)
_from_daemon: "msgspec.msgpack.Decoder[FromDaemon]" = msgspec.msgpack.Decoder(FromDaemon)


def encode_body(body: Message) -> msgspec.Raw:
    """Encode a message body for its envelope."""
    return msgspec.Raw(_encoder.encode(body))


def encode(envelope: Envelope) -> bytes:
    """Encode an envelope whose body came from ``encode_body``."""
    return _encoder.encode(envelope)


def decode_envelope(frame: bytes) -> Envelope:
    """Decode a frame's envelope, leaving its body encoded.

    Raises:
        RemoteProtocolError: not an envelope; drop the frame.
    """
    try:
        return _envelope.decode(frame)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"not a kvferry message: {error}") from None


def decode_to_daemon(envelope: Envelope) -> ToDaemon:
    """Decode the body of a message to a daemon.

    Raises:
        RemoteProtocolError: unknown type or wrong fields; count, log, drop.
    """
    try:
        return _to_daemon.decode(envelope.body)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"bad message to a daemon: {error}") from None


def decode_from_daemon(envelope: Envelope) -> FromDaemon:
    """Decode the body of a message from a daemon.

    Raises:
        RemoteProtocolError: unknown type or wrong fields; count, log, drop.
    """
    try:
        return _from_daemon.decode(envelope.body)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"bad message from a daemon: {error}") from None
