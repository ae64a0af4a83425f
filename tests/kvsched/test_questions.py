from types import SimpleNamespace
from typing import Any

import pytest

from kvsched.core.commands import AnswerMatch
from kvsched.core.events import MatchAsked
from kvsched.questions import Questions
from tests.support.schedplay import SIZE, Play, hashes


def request(name: str = "a", num_blocks: int = 4) -> Any:
    return SimpleNamespace(
        request_id=name, num_tokens=num_blocks * SIZE, block_hashes=list(hashes(num_blocks))
    )


class Asker:
    """Asks as the shell does; counts what reaches the core."""

    def __init__(self) -> None:
        self.play = Play()
        self.questions = Questions()
        self.recorded: list[MatchAsked] = []

    def add(self, wanted: Any) -> list[Any]:
        event = self.questions.added(wanted)
        self.play.now_ns = event.now_ns
        return self.play.say(event)

    def ask(self, wanted: Any) -> int | None:
        event = self.questions.asked(self.play.core, wanted, 0)
        if event is None:
            return None
        self.recorded.append(event)
        (answer,) = (each for each in self.play.say(event) if isinstance(each, AnswerMatch))
        self.questions.answered(answer)
        return answer.num_tokens


def test_a_question_is_recorded_when_it_is_new_and_when_it_has_an_answer() -> None:
    asker, wanted = Asker(), request()
    commands = asker.add(wanted)
    assert [asker.ask(wanted) for _ in range(100)] == [None] * 100
    assert len(asker.recorded) == 1
    asker.play.found(commands, 3)
    assert [asker.ask(wanted) for _ in range(2)] == [3 * SIZE] * 2
    assert len(asker.recorded) == 3


def test_a_request_that_grew_asks_anew_and_tells_its_hashes_once() -> None:
    asker, wanted = Asker(), request(num_blocks=2)
    asker.add(wanted)
    asker.ask(wanted)
    wanted.num_tokens, wanted.block_hashes = 4 * SIZE, list(hashes(4))
    assert [asker.ask(wanted) for _ in range(10)] == [None] * 10
    assert [len(event.block_hashes) for event in asker.recorded] == [0, 4]


def test_requests_wait_each_for_itself() -> None:
    asker, one, other = Asker(), request("one"), request("other")
    asker.add(one)
    commands = asker.add(other)
    asker.ask(one)
    asker.ask(other)
    asker.play.found(commands, 2)
    assert asker.ask(one) is None
    assert asker.ask(other) == 2 * SIZE
    assert [event.request_id for event in asker.recorded] == ["one", "other", "other"]


def test_the_same_id_again_is_another_request() -> None:
    asker, wanted = Asker(), request()
    asker.add(wanted)
    asker.ask(wanted)
    asker.play.finish(wanted.request_id)
    assert asker.questions.forget(wanted.request_id)
    assert not asker.questions.forget(wanted.request_id)
    asker.add(wanted)
    assert asker.ask(wanted) is None
    assert len(asker.recorded) == 2


@pytest.mark.parametrize("late", [False, True])
def test_a_lookup_that_is_late_is_a_miss_at_the_next_question(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker, wanted = Asker(), request()
    asker.add(wanted)
    assert asker.ask(wanted) is None
    timeout_ns = int(asker.play.config.lookup_timeout_ms * 1e6)
    now_ns = asker.play.now_ns + (2 * timeout_ns if late else timeout_ns // 2)
    monkeypatch.setattr("kvsched.questions.time.monotonic_ns", lambda: now_ns)
    assert asker.ask(wanted) == (0 if late else None)
    assert len(asker.recorded) == (2 if late else 1)
