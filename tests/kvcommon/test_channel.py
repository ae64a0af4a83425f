"""Channel: in order, once, and never a gap unnoticed."""

from hypothesis import given
from hypothesis import strategies as st

from kvcommon.channel import Channel, Reception, refusal
from kvcommon.messages import Envelope, Heartbeat, Refused, StepBegun, decode_from_daemon
from kvcommon.messages.codec import decode_envelope, decode_to_daemon


def pair() -> tuple[Channel, Channel]:
    """Both ends of a fresh conversation: the opening side and the daemon."""
    return Channel("e", 0, "model", 11), Channel("e", 0, "model", 22)


def say(sender: Channel, step: int = 1, cause: str = "") -> Envelope:
    """One message as it arrives."""
    return decode_envelope(sender.stamp(StepBegun(step=step), cause))


def test_envelope_carries_the_conversation() -> None:
    a, b = pair()
    envelope = say(a, step=7, cause="log:3")
    assert (envelope.engine, envelope.rank, envelope.role) == ("e", 0, "model")
    assert (envelope.epoch, envelope.peer_epoch, envelope.seq, envelope.ack) == (11, 0, 1, 0)
    assert envelope.cause == "log:3"
    assert decode_to_daemon(envelope) == StepBegun(step=7)
    assert b.accept(envelope) is Reception.OK
    reply = say(b)
    assert (reply.peer_epoch, reply.ack) == (11, 1)


def test_in_order_is_ok_and_acknowledged() -> None:
    a, b = pair()
    for _ in range(3):
        assert b.accept(say(a)) is Reception.OK
    assert a.unacked == 3
    assert a.accept(say(b)) is Reception.OK
    assert a.unacked == 0
    assert a.peer_epoch == 22


def test_repeated_message_is_a_duplicate_and_its_ack_never_goes_back() -> None:
    a, b = pair()
    first, second = say(a), say(a)
    assert b.accept(first) is Reception.OK
    old = say(b)
    assert b.accept(second) is Reception.OK
    new = say(b)
    assert a.accept(old) is Reception.OK
    assert a.accept(new) is Reception.OK
    assert a.unacked == 0
    assert a.accept(old) is Reception.DUPLICATE
    assert a.unacked == 0
    assert b.accept(first) is Reception.DUPLICATE


def test_skipped_number_is_a_gap_and_changes_nothing() -> None:
    a, b = pair()
    assert b.accept(say(a)) is Reception.OK
    lost, after = say(a), say(a)
    assert b.accept(after) is Reception.GAP
    assert b.accept(after) is Reception.GAP
    assert b.accept(lost) is Reception.OK
    assert b.accept(after) is Reception.OK


def test_first_message_lost_is_a_gap() -> None:
    a, b = pair()
    say(a)
    assert b.accept(say(a)) is Reception.GAP
    assert b.peer_epoch == 0


def test_other_incarnations_are_stale() -> None:
    a, b = pair()
    assert b.accept(say(a)) is Reception.OK
    assert a.accept(say(b)) is Reception.OK
    restarted_daemon = Channel("e", 0, "model", 23)
    assert restarted_daemon.accept(say(a)) is Reception.STALE, "meant for the daemon before"
    assert a.accept(say(restarted_daemon)) is Reception.STALE, "not the daemon we talk to"
    restarted_model = Channel("e", 0, "model", 12)
    assert b.accept(say(restarted_model)) is Reception.STALE


def test_acknowledging_what_was_never_said_is_stale() -> None:
    a, b = pair()
    b.received = 5
    b.peer_epoch = 11
    assert a.accept(say(b)) is Reception.STALE


def test_a_sender_without_an_incarnation_is_stale() -> None:
    a = Channel("e", 0, "model", 0)
    assert pair()[1].accept(say(a)) is Reception.STALE


def test_reset_begins_again_from_one() -> None:
    a, b = pair()
    b.accept(say(a))
    a.accept(say(b))
    a.reset()
    envelope = say(a)
    assert (envelope.seq, envelope.ack, envelope.peer_epoch) == (1, 0, 0)
    b.reset(peer_epoch=11)
    assert b.accept(envelope) is Reception.OK


def test_refusal_is_accepted_by_whoever_knows_this_daemon() -> None:
    a, b = pair()
    b.accept(say(a))
    a.accept(say(b))
    forgotten = say(a)
    answer = decode_envelope(refusal(forgotten, 22, Refused(reason="unknown", resync=True)))
    assert a.accept(answer) is Reception.OK
    body = decode_from_daemon(answer)
    assert isinstance(body, Refused)
    assert body.resync


def test_refusal_of_a_restarted_daemon_is_stale() -> None:
    a, b = pair()
    b.accept(say(a))
    a.accept(say(b))
    answer = decode_envelope(refusal(say(a), 99, Refused(reason="unknown", resync=True)))
    assert a.accept(answer) is Reception.STALE


#: What the link does with each message: how many copies, and how late each is.
FATES = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=40)


@given(fates=FATES)
def test_any_link_delivers_in_order_once_or_is_noticed(fates: list[list[int]]) -> None:
    """A link that loses, repeats and reorders: what is OK is a gapless prefix of what was said."""
    a, b = pair()
    arrivals: list[tuple[int, Envelope]] = []
    for number, delays in enumerate(fates, start=1):
        envelope = say(a, step=number)
        arrivals += [(number + delay, envelope) for delay in delays]
    arrivals.sort(key=lambda arrival: arrival[0])

    delivered: list[int] = []
    seen: set[int] = set()
    for _, envelope in arrivals:
        missing_before = envelope.seq > len(delivered) + 1
        reception = b.accept(envelope)
        assert (reception is Reception.GAP) == missing_before
        if reception is Reception.OK:
            assert envelope.seq not in seen
            seen.add(envelope.seq)
            delivered.append(decode_to_daemon(envelope).step)
    assert delivered == list(range(1, len(delivered) + 1))

    probe = decode_envelope(a.stamp(Heartbeat()))
    everything = len(delivered) == len(fates)
    assert (b.accept(probe) is Reception.OK) == everything, "the next message shows every loss"


@given(
    talk=st.lists(st.booleans(), max_size=60),
    lose=st.sets(st.integers(0, 59), max_size=2),
)
def test_both_directions_agree_on_what_arrived(talk: list[bool], lose: set[int]) -> None:
    """``unacked`` never promises more than what really arrived."""
    a, b = pair()
    for index, from_a in enumerate(talk):
        sender, receiver = (a, b) if from_a else (b, a)
        envelope = say(sender)
        if index not in lose:
            receiver.accept(envelope)
        assert 0 <= a.sent - a.unacked <= b.received
        assert 0 <= b.sent - b.unacked <= a.received
