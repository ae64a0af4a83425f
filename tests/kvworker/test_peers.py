"""Which message belongs to which conversation, and what breaks one."""

from kvcommon.channel import Channel
from kvcommon.layout import CacheLayout
from kvcommon.memory.handles import LocalHandle, PageHandle
from kvcommon.messages import Attach, Heartbeat, Hello, Message, StepBegun, decode_to_daemon
from kvcommon.messages.codec import decode_envelope
from kvworker.peers import MAX_PEERS, Admission, PeerTable, Role
from tests.support.fakemodel import NAMESPACE

DAEMON = 77
ATTACH = Attach(
    pid=1,
    device="cpu:0",
    storages=(),
    layout=CacheLayout(groups=(), storage_bytes=()),
    page=PageHandle(storage=LocalHandle(address=1, size=1)),
    namespace=NAMESPACE,
    lease_ms=100,
)
HELLO = Hello(pid=1, ranks=())


class Side:
    """The other end of one conversation."""

    def __init__(self, table: PeerTable, role: Role, epoch: int = 5, engine: str = "e") -> None:
        self.table, self.role = table, role
        self.identity = f"{role.value}{epoch}".encode()
        self.channel = Channel(engine, 0, role.value, epoch)

    def say(self, body: Message, now_ns: int = 0) -> Admission:
        envelope = decode_envelope(self.channel.stamp(body))
        decoded = decode_to_daemon(envelope)
        return self.table.admit(self.identity, envelope, decoded, self.role, now_ns)


def test_conversations_begin_with_their_opening_message() -> None:
    table = PeerTable(DAEMON)
    for role, opening in ((Role.MODEL, ATTACH), (Role.SCHEDULER, HELLO)):
        admission = Side(table, role).say(opening)
        assert admission.opened
        assert admission.peer is table.get("e#0", role)
    assert len(table) == 2


def test_anything_before_the_opening_message_is_refused() -> None:
    table = PeerTable(DAEMON)
    assert "Attach" in Side(table, Role.MODEL).say(StepBegun(step=1)).refusal
    assert "Hello" in Side(table, Role.SCHEDULER).say(Heartbeat()).refusal
    assert not len(table)


def test_opening_message_out_of_sequence_is_refused() -> None:
    side = Side(PeerTable(DAEMON), Role.MODEL)
    side.channel.stamp(Heartbeat())
    assert side.say(ATTACH).refusal


def test_data_begins_once_the_same_incarnation_has_attached() -> None:
    table = PeerTable(DAEMON)
    early, late = Side(table, Role.DATA), Side(table, Role.DATA)
    assert early.say(StepBegun(step=1)).refusal
    Side(table, Role.MODEL).say(ATTACH)
    assert Side(table, Role.DATA, epoch=6).say(StepBegun(step=1)).refusal
    assert late.say(StepBegun(step=1)).opened
    assert late.say(StepBegun(step=2)).peer is table.get("e#0", Role.DATA)


def test_a_repeated_first_data_message_does_not_begin_again() -> None:
    table = PeerTable(DAEMON)
    Side(table, Role.MODEL).say(ATTACH)
    data = Side(table, Role.DATA)
    data.say(StepBegun(step=1))
    data.channel.sent = 0
    admission = data.say(StepBegun(step=1))
    assert admission.duplicate
    assert admission.peer is None


def test_gap_breaks_the_conversation() -> None:
    table = PeerTable(DAEMON)
    side = Side(table, Role.SCHEDULER)
    peer = side.say(HELLO).peer
    side.channel.stamp(Heartbeat())
    admission = side.say(Heartbeat())
    assert admission.broken is peer
    assert "3 came where 2" in admission.refusal
    assert table.get("e#0", Role.SCHEDULER) is None
    side.channel.reset()
    assert side.say(HELLO).opened


def test_message_for_another_daemon_breaks_the_conversation() -> None:
    table = PeerTable(DAEMON)
    side = Side(table, Role.SCHEDULER)
    side.say(HELLO)
    side.channel.peer_epoch = DAEMON + 1
    assert side.say(Heartbeat()).broken is not None


def test_opening_message_for_another_daemon_is_refused() -> None:
    side = Side(PeerTable(DAEMON), Role.SCHEDULER)
    side.channel.peer_epoch = DAEMON + 1
    assert side.say(HELLO).refusal


def test_new_incarnation_takes_over_and_the_old_is_refused() -> None:
    table = PeerTable(DAEMON)
    old, new = Side(table, Role.MODEL, epoch=5), Side(table, Role.MODEL, epoch=6)
    old.say(ATTACH)
    assert new.say(ATTACH).opened
    assert old.say(Heartbeat()).refusal
    peer = table.get("e#0", Role.MODEL)
    assert peer is not None
    assert peer.epoch == 6


def test_same_name_from_another_connection_is_refused() -> None:
    table = PeerTable(DAEMON)
    side = Side(table, Role.SCHEDULER)
    side.say(HELLO)
    side.identity = b"stranger"
    assert side.say(Heartbeat()).refusal
    assert table.get("e#0", Role.SCHEDULER) is not None


def test_undecodable_body_counts_in_the_sequence() -> None:
    table = PeerTable(DAEMON)
    side = Side(table, Role.SCHEDULER)
    side.say(HELLO)
    unknown = decode_envelope(side.channel.stamp(Heartbeat()))
    assert table.admit(side.identity, unknown, None, side.role, 0).peer is not None
    assert side.say(Heartbeat()).peer is not None


def test_the_number_of_conversations_is_bounded() -> None:
    table = PeerTable(DAEMON)
    for number in range(MAX_PEERS):
        assert Side(table, Role.SCHEDULER, engine=f"e{number}").say(HELLO).opened
    assert "too many" in Side(table, Role.SCHEDULER, engine="more").say(HELLO).refusal
    assert Side(table, Role.SCHEDULER, epoch=9, engine="e0").say(HELLO).opened


def test_lease_ends_when_neither_conversation_says_anything() -> None:
    table = PeerTable(DAEMON)
    control, data = Side(table, Role.MODEL), Side(table, Role.DATA)
    control.say(ATTACH, now_ns=0)
    assert not table.silent(100_000_000)
    assert [peer.key.role for peer in table.silent(100_000_001)] == [Role.MODEL]
    data.say(StepBegun(step=1), now_ns=90_000_000)
    assert not table.silent(150_000_000)


def test_scheduler_has_no_lease() -> None:
    table = PeerTable(DAEMON)
    Side(table, Role.SCHEDULER).say(HELLO)
    assert not table.silent(10**18)


def test_forget_spares_a_successor() -> None:
    table = PeerTable(DAEMON)
    old = Side(table, Role.SCHEDULER, epoch=5).say(HELLO).peer
    Side(table, Role.SCHEDULER, epoch=6).say(HELLO)
    assert old is not None
    table.forget(old)
    assert len(table) == 1


def test_a_repeated_opening_message_begins_nothing_anew() -> None:
    table = PeerTable(DAEMON)
    for role, opening in ((Role.MODEL, ATTACH), (Role.SCHEDULER, HELLO)):
        side = Side(table, role)
        envelope = decode_envelope(side.channel.stamp(opening))
        first = table.admit(side.identity, envelope, opening, role, 0)
        assert first.opened
        again = table.admit(side.identity, envelope, opening, role, 0)
        assert again.duplicate
        assert table.get("e#0", role) is first.peer
        # Whoever begins again has another identity.
        side.identity += b"/2"
        assert table.admit(side.identity, envelope, opening, role, 0).opened
