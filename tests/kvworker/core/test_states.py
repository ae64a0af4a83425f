"""Legal moves are data, and nothing else moves."""

import enum
from pathlib import Path

import pytest

from kvcommon.errors import LocalProtocolError
from kvworker.core.states import (
    MOVES,
    BlockState,
    JobState,
    LoadState,
    MapState,
    SaveState,
    moved,
)

EVERY = [state for kind in (MapState, JobState, BlockState, SaveState, LoadState) for state in kind]
#: Where each kind begins.
FIRST: dict[type[enum.Enum], enum.Enum] = {
    MapState: MapState.ABSENT,
    JobState: JobState.OPEN,
    BlockState: BlockState.WAITING,
    SaveState: SaveState.WAITING,
    LoadState: LoadState.PLANNED,
}
_PAGE = Path(__file__).parents[3] / "docs" / "worker-states.md"


def test_the_table_names_every_state_and_stays_within_its_kind() -> None:
    assert set(MOVES) == set(EVERY)
    for state, targets in MOVES.items():
        assert all(type(target) is type(state) for target in targets)
        assert state not in targets


@pytest.mark.parametrize("kind", FIRST)
def test_every_state_can_be_reached(kind: type[enum.Enum]) -> None:
    seen = {FIRST[kind]}
    while True:
        more = {target for state in seen for target in MOVES[state]} - seen
        if not more:
            break
        seen |= more
    assert seen == set(kind)


def test_a_legal_move() -> None:
    assert moved("x", JobState.OPEN, JobState.ENDED) is JobState.ENDED


def test_an_illegal_move_says_who_from_where_and_the_story() -> None:
    with pytest.raises(LocalProtocolError, match=r"saves of step 3: closed → writing .* a → b"):
        moved("saves of step 3", SaveState.CLOSED, SaveState.WRITING, ["a", "b"])


def test_an_ended_job_never_moves() -> None:
    for target in JobState:
        with pytest.raises(LocalProtocolError):
            moved("job", JobState.ENDED, target)


def test_the_page_shows_the_table() -> None:
    text = _PAGE.read_text()
    for state, targets in MOVES.items():
        for target in targets:
            assert f"    {state.value} --> {target.value}\n" in text, (
                f"{_PAGE.name}: {type(state).__name__} {state.value} --> {target.value} is missing"
            )
    arrows = sum(line.strip().count("-->") for line in text.splitlines() if "[*]" not in line)
    assert arrows == sum(len(targets) for targets in MOVES.values())
