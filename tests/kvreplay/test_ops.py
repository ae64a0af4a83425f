"""Operations, engine keys, store keys."""

import typing

from kvreplay import ops
from kvworker.core import commands as do
from kvworker.core import events as ev
from tests.kvreplay import scenes


def test_every_command_with_an_op_but_cancel_has_its_answer() -> None:
    commands = typing.get_args(do.WorkerCommand)
    with_op = {one for one in commands if "op" in one.__struct_fields__}
    assert with_op - {do.Cancel} == set(ops.ANSWERS)


def test_every_event_with_an_op_is_an_answer() -> None:
    events = typing.get_args(ev.WorkerEvent)
    assert {one for one in events if "op" in one.__struct_fields__} == ops.TERMINAL_EVENTS


def test_ops_of_commands_and_events() -> None:
    assert ops.started_op(do.ProbeStore(op=4)) == 4
    assert ops.started_op(do.Cancel(op=4)) is None
    assert ops.ended_op(ev.GetsClosed(now_ns=1, op=5)) == 5
    assert ops.ended_op(ev.Ticked(now_ns=1)) is None
    assert ops.ended_op(None) is None


def test_engine_keys() -> None:
    assert ops.engine_id("a#b#3") == "a#b"
    assert ops.rank_of("a#b#3") == 3
    assert ops.rank_of("nonsense") == -1
    assert ops.rank_of("a#" + "9" * 5000) == -1


def test_the_hash_of_a_store_key() -> None:
    assert ops.key_hash(scenes.key(b"\xab" * 32)) == "ab" * 32


def test_keys_of_commands() -> None:
    close = do.ClosePuts(op=1, engine="e#0", step=1, end=("a",), revoke=("b",))
    assert ops.keys_of(close) == ("a", "b")
    assert ops.keys_of(do.ProbeStore(op=1)) == ()


def test_parts_of_a_key() -> None:
    key = "kvf1-00ff-3-abcd"
    assert (ops.key_mark(key), ops.key_group(key), ops.key_hash(key)) == ("00ff", 3, "abcd")
    assert (ops.key_mark("x"), ops.key_group("x-y-z"), ops.key_group("")) == ("", -1, -1)
