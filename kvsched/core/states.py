"""The states of a request's lookup and the legal moves between them, as data.

``docs`` draws its picture from ``MOVES``; nothing else decides what is legal.
"""

import enum
from typing import Final

from kvcommon.errors import LocalProtocolError


class LookupState(str, enum.Enum):
    """Where the lookup of one request is."""

    #: None was sent, or its answer was used, released or outdated.
    NONE = "none"
    #: Sent; not answered yet.
    PENDING = "pending"
    #: Answered; at least one block is stored. Holds the store's lease until used or released.
    HIT = "hit"
    #: Answered; nothing is stored.
    MISS = "miss"
    #: Not answered in time; vLLM was told 0.
    TIMED_OUT = "timed-out"


class LookupMove(str, enum.Enum):
    """What can happen to a lookup."""

    SEND = "send"
    FIND = "find"
    FIND_NOTHING = "find-nothing"
    TIME_OUT = "time-out"
    #: Used by a load, released, outdated, or its daemon is gone.
    DROP = "drop"


#: (from, move) → to. A pair that is not here is illegal.
MOVES: Final[dict[tuple[LookupState, LookupMove], LookupState]] = {
    (LookupState.NONE, LookupMove.SEND): LookupState.PENDING,
    (LookupState.PENDING, LookupMove.FIND): LookupState.HIT,
    (LookupState.PENDING, LookupMove.FIND_NOTHING): LookupState.MISS,
    (LookupState.PENDING, LookupMove.TIME_OUT): LookupState.TIMED_OUT,
    (LookupState.PENDING, LookupMove.DROP): LookupState.NONE,
    (LookupState.HIT, LookupMove.DROP): LookupState.NONE,
    (LookupState.MISS, LookupMove.DROP): LookupState.NONE,
    (LookupState.TIMED_OUT, LookupMove.DROP): LookupState.NONE,
}


def moved(key: str, state: LookupState, move: LookupMove) -> LookupState:
    """Return the state after ``move``.

    Raises:
        LocalProtocolError: the move is illegal from ``state``; nothing has changed.
    """
    after = MOVES.get((state, move))
    if after is None:
        raise LocalProtocolError(f"lookup of {key}: cannot {move.value} while {state.value}")
    return after
