"""Round trips of every message, found by introspection, and what happens to bad frames."""

import typing
from collections.abc import Callable

import msgspec
import msgspec.inspect as mi
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcommon.errors import RemoteProtocolError
from kvcommon.messages import (
    PROTOCOL_VERSION,
    Attach,
    DaemonToModel,
    DaemonToScheduler,
    Envelope,
    FromDaemon,
    Heartbeat,
    LayersComputed,
    Message,
    ModelToDaemon,
    PlanAck,
    SchedulerToDaemon,
    StatusRequest,
    ToDaemon,
    decode_from_daemon,
    decode_to_daemon,
    encode,
)
from kvcommon.messages.codec import decode_envelope, encode_body

Decode = Callable[[Envelope], Message]


def members(union: object) -> tuple[type[Message], ...]:
    return typing.get_args(union)


DIRECTIONS: list[tuple[type[Message], Decode]] = [
    *((kind, decode_to_daemon) for kind in members(ToDaemon)),
    *((kind, decode_from_daemon) for kind in members(FromDaemon)),
]


def sample_struct(described: mi.StructType) -> object:
    return described.cls(**{f.name: sample(f.type) for f in described.fields})


#: A value for each kind of field, chosen so that it is no field's default.
SAMPLES: dict[type[mi.Type], Callable[..., object]] = {
    mi.IntType: lambda _: 7,
    mi.FloatType: lambda _: 1.5,
    mi.BoolType: lambda _: True,
    mi.StrType: lambda _: "text",
    mi.BytesType: lambda _: b"\x00\xff",
    mi.EnumType: lambda kind: list(kind.cls)[-1],
    mi.VarTupleType: lambda kind: (sample(kind.item_type), sample(kind.item_type)),
    mi.TupleType: lambda kind: tuple(sample(item) for item in kind.item_types),
    mi.DictType: lambda kind: {sample(kind.key_type): sample(kind.value_type)},
    mi.UnionType: lambda kind: sample(kind.types[0]),
    mi.StructType: sample_struct,
}


def sample(kind: mi.Type) -> object:
    return SAMPLES[type(kind)](kind)


def sample_message(kind: type[Message]) -> Message:
    made = sample(mi.type_info(kind))
    assert isinstance(made, Message)
    return made


def envelope(body: msgspec.Raw) -> Envelope:
    return Envelope(
        version=PROTOCOL_VERSION, engine="e", rank=1, role="model", epoch=2, seq=3, body=body
    )


def raw(fields: object) -> Envelope:
    return envelope(msgspec.Raw(msgspec.msgpack.encode(fields)))


@pytest.mark.parametrize(("kind", "decode"), DIRECTIONS)
def test_round_trip(kind: type[Message], decode: Decode) -> None:
    body = sample_message(kind)
    for field in msgspec.structs.fields(kind):
        assert getattr(body, field.name) != field.default
    sent = envelope(encode_body(body))
    received = decode_envelope(encode(sent))
    assert decode(received) == body
    assert (received.engine, received.rank, received.role) == ("e", 1, "model")
    assert (received.epoch, received.seq, received.ack, received.cause) == (2, 3, 0, "")


def test_every_message_type_has_a_direction() -> None:
    def below(kind: type[Message]) -> set[type[Message]]:
        found = set(kind.__subclasses__())
        return found.union(*(below(sub) for sub in found))

    assert below(Message) == {kind for kind, _ in DIRECTIONS}


def test_unions_are_made_of_their_directions() -> None:
    assert set(members(ToDaemon)) == {
        *members(ModelToDaemon),
        *members(SchedulerToDaemon),
        StatusRequest,
    }
    assert {*members(DaemonToModel), *members(DaemonToScheduler)} < set(members(FromDaemon))


@pytest.mark.parametrize("decode", [decode_to_daemon, decode_from_daemon])
def test_unknown_type(decode: Decode) -> None:
    with pytest.raises(RemoteProtocolError, match="Invalid value 'FromTheFuture'"):
        decode(raw({"type": "FromTheFuture"}))


@pytest.mark.parametrize(
    ("kind", "decode"), [(Attach, decode_from_daemon), (PlanAck, decode_to_daemon)]
)
def test_wrong_direction(kind: type[Message], decode: Decode) -> None:
    with pytest.raises(RemoteProtocolError, match=f"Invalid value '{kind.__name__}'"):
        decode(envelope(encode_body(sample_message(kind))))


def test_unknown_fields_are_tolerated() -> None:
    message = raw({"type": "LayersComputed", "step": 4, "num_layers": 2, "colour": "red"})
    assert decode_to_daemon(message) == LayersComputed(step=4, num_layers=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "LayersComputed"},
        {"type": "LayersComputed", "num_layers": "2"},
        {"num_layers": 2},
        ["LayersComputed", 2],
        None,
        5,
    ],
)
def test_wrong_fields(fields: object) -> None:
    with pytest.raises(RemoteProtocolError, match="bad message to a daemon"):
        decode_to_daemon(raw(fields))


def test_default_fields_cost_nothing() -> None:
    assert bytes(encode_body(Heartbeat())) == msgspec.msgpack.encode({"type": "Heartbeat"})


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"hello", b"\x80", b"\x93\x01\x02\x03"])
def test_junk_frames(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a kvferry message"):
        decode_envelope(frame)


@given(st.binary(max_size=64))
def test_any_frame_is_a_message_or_a_protocol_error(frame: bytes) -> None:
    try:
        received = decode_envelope(frame)
        decode_to_daemon(received)
    except RemoteProtocolError:
        pass


@given(st.sampled_from(DIRECTIONS), st.data())
def test_a_damaged_message_is_a_message_or_a_protocol_error(
    direction: tuple[type[Message], Decode], data: st.DataObject
) -> None:
    kind, decode = direction
    frame = bytearray(encode(envelope(encode_body(sample_message(kind)))))
    where = data.draw(st.integers(0, len(frame) - 1))
    frame[where] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    try:
        received = decode_envelope(bytes(frame[:cut]))
        decode(received)
    except RemoteProtocolError:
        pass
