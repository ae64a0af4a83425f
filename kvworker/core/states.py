"""The states of everything that lives in the core, and every legal move, as data.

``docs/worker-states.md`` is drawn from ``MOVES``. A move that is not in the table changes nothing
and raises.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvcommon.errors import LocalProtocolError


class MapState(enum.Enum):
    """The memory of one rank's model side."""

    ABSENT = "absent"
    #: ``MapEngine`` is in flight.
    MAPPING = "mapping"
    #: Lookups and plans are served.
    MAPPED = "mapped"
    #: ``UnmapEngine`` is in flight.
    UNMAPPING = "unmapping"


class JobState(enum.Enum):
    """One load or save on this rank."""

    OPEN = "open"
    #: Given up, but an operation that may touch its blocks has not answered yet.
    CANCELLING = "cancelling"
    #: Reported; nothing of it is touched any more.
    ENDED = "ended"


class BlockState(enum.Enum):
    """One block of a job."""

    WAITING = "waiting"
    #: Its session is being opened.
    OPENING = "opening"
    #: Its session is open; bytes may move.
    OPEN = "open"
    #: Save: published. Load: its bytes are in the block.
    DONE = "done"
    #: Save: stored already, or being stored by somebody else.
    SKIPPED = "skipped"
    FAILED = "failed"
    CANCELLED = "cancelled"


class SaveState(enum.Enum):
    """The saves of one step and group."""

    #: The step has not begun.
    WAITING = "waiting"
    #: ``OpenPuts`` is in flight.
    OPENING = "opening"
    #: Sessions are open, nothing is in flight.
    OPEN = "open"
    #: ``WriteLayers`` is in flight.
    WRITING = "writing"
    #: ``ClosePuts`` is in flight.
    CLOSING = "closing"
    CLOSED = "closed"


class LoadState(enum.Enum):
    """The loads of one step and group, of one kind (layerwise or asynchronous)."""

    #: Nothing is asked of the store yet.
    PLANNED = "planned"
    #: ``OpenGets`` is in flight.
    OPENING = "opening"
    #: Sessions are open, nothing is in flight; perhaps the step has not begun.
    OPEN = "open"
    #: ``LoadLayers`` is in flight.
    LOADING = "loading"
    #: ``CloseGets`` is in flight.
    CLOSING = "closing"
    CLOSED = "closed"


MOVES: Mapping[enum.Enum, tuple[enum.Enum, ...]] = {
    MapState.ABSENT: (MapState.MAPPING,),
    MapState.MAPPING: (MapState.MAPPED, MapState.UNMAPPING, MapState.ABSENT),
    MapState.MAPPED: (MapState.UNMAPPING,),
    MapState.UNMAPPING: (MapState.ABSENT,),
    JobState.OPEN: (JobState.CANCELLING, JobState.ENDED),
    JobState.CANCELLING: (JobState.ENDED,),
    JobState.ENDED: (),
    BlockState.WAITING: (
        BlockState.OPENING,
        BlockState.SKIPPED,
        BlockState.FAILED,
        BlockState.CANCELLED,
    ),
    BlockState.OPENING: (
        BlockState.OPEN,
        BlockState.SKIPPED,
        BlockState.FAILED,
        BlockState.CANCELLED,
    ),
    BlockState.OPEN: (
        BlockState.DONE,
        BlockState.SKIPPED,
        BlockState.FAILED,
        BlockState.CANCELLED,
    ),
    BlockState.DONE: (),
    BlockState.SKIPPED: (),
    BlockState.FAILED: (),
    BlockState.CANCELLED: (),
    SaveState.WAITING: (SaveState.OPENING, SaveState.CLOSED),
    SaveState.OPENING: (SaveState.OPEN,),
    SaveState.OPEN: (SaveState.WRITING, SaveState.CLOSING, SaveState.CLOSED),
    SaveState.WRITING: (SaveState.OPEN,),
    SaveState.CLOSING: (SaveState.CLOSED,),
    SaveState.CLOSED: (),
    LoadState.PLANNED: (LoadState.OPENING, LoadState.CLOSED),
    LoadState.OPENING: (LoadState.OPEN,),
    LoadState.OPEN: (LoadState.LOADING, LoadState.CLOSING, LoadState.CLOSED),
    LoadState.LOADING: (LoadState.OPEN,),
    LoadState.CLOSING: (LoadState.CLOSED,),
    LoadState.CLOSED: (),
}

State = TypeVar("State", bound=enum.Enum)


def moved(name: str, state: State, to: State, story: Sequence[str] = ()) -> State:
    """Return ``to`` if the table allows the move.

    Args:
        name: Of whatever moves, for the error.
        state: Where it is.
        to: Where it shall be.
        story: Where it has been, for the error.

    Raises:
        LocalProtocolError: it does not; nothing has changed.
    """
    if to not in MOVES[state]:
        past = " → ".join(story)
        raise LocalProtocolError(f"{name}: {state.value} → {to.value} is no move; story: {past}")
    return to
