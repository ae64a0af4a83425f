"""Operations: started once, answered once, by the right event with the right number of outcomes."""

from typing import get_args

import pytest

from kvcommon.errors import LocalProtocolError
from kvworker.core.commands import Cancel, FindKeys, OpenGets, OpenPuts, WorkerCommand, WriteLayers
from kvworker.core.config import CoreConfig
from kvworker.core.events import (
    GetsClosed,
    GetsOpened,
    KeysFound,
    LayersWritten,
    PutsClosed,
    PutsOpened,
)
from kvworker.core.kernel import ANSWERS, Kernel
from kvworker.outcome import Outcome
from tests.support.playbook import kinds, load, only, save, started

OK = Outcome.OK


def kernel_with(command: FindKeys) -> tuple[Kernel, list[KeysFound]]:
    answers: list[KeysFound] = []
    kernel = Kernel(CoreConfig(device="cpu:0", store="memory"))
    kernel.start(command, answers.append)
    return kernel, answers


def test_the_answer_reaches_whoever_started_the_work() -> None:
    command = FindKeys(op=1, engine="e", keys=("k",))
    kernel, answers = kernel_with(command)
    event = KeysFound(now_ns=1, op=1, outcomes=(OK,))
    kernel.answer(event)
    assert answers == [event]
    assert kernel.out == [command]
    with pytest.raises(LocalProtocolError, match="not open"):
        kernel.answer(event)


def test_an_operation_that_nobody_started() -> None:
    with pytest.raises(LocalProtocolError, match="GetsClosed: operation 9 is not open"):
        started().core.handle(GetsClosed(now_ns=1, op=9))


def test_an_answer_of_the_wrong_kind_changes_nothing() -> None:
    play = started()
    gets = only(play.plan(1, load(1, {4: 40})), OpenGets)
    with pytest.raises(LocalProtocolError, match="PutsOpened does not answer OpenGets"):
        play.core.handle(PutsOpened(now_ns=1, op=gets.op, outcomes=(OK,)))
    assert play.answer(gets) == []


def test_a_wrong_number_of_outcomes_changes_nothing() -> None:
    play = started()
    gets = only(play.plan(1, load(1, {4: 40})), OpenGets)
    with pytest.raises(LocalProtocolError, match="wrong number"):
        play.core.handle(GetsOpened(now_ns=1, op=gets.op, outcomes=(OK, OK)))
    assert play.answer(gets) == []


def test_bytes_are_needed_for_every_key_written() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}))
    play.answer(only(play.begin(1), OpenPuts))
    write = only(play.computed(1), WriteLayers)
    with pytest.raises(LocalProtocolError, match="wrong number"):
        play.core.handle(LayersWritten(now_ns=1, op=write.op, outcomes=(OK,), num_bytes=()))
    close: list[WorkerCommand] = play.answer(write) + play.verdict(1)
    assert kinds(close) == ["ClosePuts"]
    op = close[0].op  # type: ignore[union-attr]
    with pytest.raises(LocalProtocolError, match="wrong number"):
        play.core.handle(PutsClosed(now_ns=1, op=op, ended=(OK, OK)))


def test_ops_are_never_reused() -> None:
    kernel = Kernel(CoreConfig(device="cpu:0", store="memory"))
    assert [kernel.next_op() for _ in range(3)] == [1, 2, 3]


def test_every_command_with_an_op_has_an_answer() -> None:
    every = {kind for kind in get_args(WorkerCommand) if "op" in kind.__struct_fields__}
    assert every - {Cancel} == set(ANSWERS)
    assert len(set(ANSWERS.values())) == len(ANSWERS)


def test_counters_are_named_as_prometheus_writes_them() -> None:
    kernel = Kernel(CoreConfig(device="cpu:0", store="memory"))
    kernel.count("things")
    kernel.count("things", 2, kind="a", reason="")
    assert kernel.counters == {
        "kvferry_things_total": 1,
        'kvferry_things_total{kind="a",reason=""}': 2,
    }
