import re

import pytest

from kvworker.outcome import Outcome
from kvworker.stores import mooncake_codes as codes


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (-101, Outcome.MISS),
        (-200, Outcome.FULL),
        (-703, Outcome.MISS),
        (-704, Outcome.MISS),
        (-705, Outcome.EXISTS),
        (-707, Outcome.EXPIRED),
        (-710, Outcome.MISS),
        (-712, Outcome.MISS),
        (-900, Outcome.DOWN),
        (-901, Outcome.DOWN),
        (-1010, Outcome.DOWN),
        (-1700, Outcome.FULL),
        (-600, Outcome.FAILED),
        (-800, Outcome.FAILED),
        (codes.NO_ANSWER, Outcome.FAILED),
        (-987654, Outcome.FAILED),
    ],
)
def test_every_kind_of_call_reads_a_failure_the_same_way(code: int, outcome: Outcome) -> None:
    assert codes.failure(code) is outcome
    assert codes.done(code) is outcome
    assert codes.moved(code, 10) is outcome
    assert codes.found(code) is outcome


def test_success_depends_on_the_call() -> None:
    assert codes.done(0) is Outcome.OK
    assert codes.done(1) is Outcome.FAILED
    assert codes.moved(10, 10) is Outcome.OK
    assert codes.moved(9, 10) is Outcome.FAILED
    assert codes.moved(0, 10) is Outcome.FAILED
    assert codes.moved(-600, -600) is Outcome.FAILED
    assert codes.found(1) is Outcome.OK
    assert codes.found(0) is Outcome.MISS
    assert codes.found(2) is Outcome.FAILED


@pytest.mark.parametrize("text", ["kvf1-0af3-0-", "a.b", "^$\\.*+?()[]{}|/", ""])
def test_a_quoted_text_matches_itself_alone(text: str) -> None:
    pattern = re.compile("^" + codes.quote(text) + "$")
    assert pattern.match(text)
    assert not pattern.match(text + "x")
    assert not pattern.match("a" + text)
