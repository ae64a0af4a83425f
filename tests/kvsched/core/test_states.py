import pytest

from kvcommon.errors import LocalProtocolError
from kvsched.core.states import MOVES, LookupMove, LookupState, moved


def test_every_state_can_be_reached_and_left() -> None:
    assert {state for state, _ in MOVES} == set(LookupState)
    assert set(MOVES.values()) == set(LookupState)
    assert {move for _, move in MOVES} == set(LookupMove)


def test_a_legal_move() -> None:
    assert moved("a", LookupState.NONE, LookupMove.SEND) is LookupState.PENDING


def test_an_illegal_move_names_the_request_and_the_state() -> None:
    with pytest.raises(LocalProtocolError, match="lookup of a: cannot send while pending"):
        moved("a", LookupState.PENDING, LookupMove.SEND)
