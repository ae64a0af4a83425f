"""Every event, command and message has words of its own."""

import typing

import pytest

from kvcommon import messages as msg
from kvreplay import words
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome


def test_every_type_has_words() -> None:
    events = {*typing.get_args(sched.SchedEvent), *typing.get_args(work.WorkerEvent)}
    assert events == set(words._EVENTS)
    commands = {
        *typing.get_args(sched_do.SchedCommand),
        *typing.get_args(work_do.WorkerCommand),
    }
    assert commands == set(words._COMMANDS)
    bodies = {
        *typing.get_args(msg.ModelToDaemon),
        *typing.get_args(msg.SchedulerToDaemon),
        *typing.get_args(msg.DaemonToModel),
        *typing.get_args(msg.DaemonToScheduler),
    }
    assert bodies == set(words._BODIES)


@pytest.mark.parametrize(
    ("ids", "text"),
    [((), ""), ((3,), "3"), ((3, 4, 5, 9), "3-5, 9"), (range(0, 20, 2), "0, 2, 4, 6, 8, 10, …")],
)
def test_spans(ids: tuple[int, ...], text: str) -> None:
    assert words.spans(ids) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")]
)
def test_size(num_bytes: int, text: str) -> None:
    assert words.size(num_bytes) == text


def test_counts_and_outcomes() -> None:
    assert words.count(1, "block") == "1 block"
    assert words.count(2, "block") == "2 blocks"
    assert words.outcomes((Outcome.OK, Outcome.MISS, Outcome.OK)) == "2 ok, 1 miss"


def test_an_answer_says_how_much_and_why() -> None:
    answer = sched_do.AnswerMatch(request_id="r", num_tokens=0, reason="not-stored")
    assert words.command_text(answer) == "answers vLLM: 0 tokens to load (not-stored)"
    answer = sched_do.AnswerMatch(request_id="r", num_tokens=None)
    assert "ask again" in words.command_text(answer)


def test_text_of_a_log_cannot_carry_control_characters_or_run_on() -> None:
    event = sched.RequestFinished(now_ns=1, request_id="\x1b[2J" + "x" * 1000)
    text = words.event_text(event)
    assert "\x1b" not in text
    assert len(text) < 100


def test_an_event_that_cannot_be_read_has_words_too() -> None:
    assert "cannot read" in words.event_text(None)


def test_ranks() -> None:
    assert words.on_ranks([1]) == "rank 1"
    assert words.on_ranks([0, 1, 3]) == "ranks 0-1, 3"
