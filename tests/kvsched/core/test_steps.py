from hypothesis import given
from hypothesis import strategies as st

from kvsched.core.steps import SaveNote, StepRecord, Steps, first_in, spoiled

TABLE = st.lists(st.integers(0, 12), max_size=6, unique=True)


def step(number: int, *job_ids: int) -> StepRecord:
    notes = tuple(
        SaveNote(job_id=j, request_id="a", serial=1, first_block=0, blocks=[1, 2, 3], num_blocks=2)
        for j in job_ids
    )
    return StepRecord(
        step=number,
        planned_ns=100,
        num_tokens=9,
        has_loads=False,
        ranks={0: 7},
        saves=notes,
        jobs=job_ids,
    )


def test_a_note_keeps_the_table_as_it_was() -> None:
    (note,) = step(1, 5).saves
    note.blocks.append(4)
    assert note.table == [1, 2]


def test_finished_steps_stay_until_their_saves_have_ended() -> None:
    steps = Steps()
    for record in (step(1, 5), step(2, 6), step(3)):
        steps.add(record)
        record.finished = record.step < 3
    steps.forget([6])
    assert [record.step for record in steps] == [2, 3]
    assert [record.step for record in steps.unfinished()] == [3]
    assert steps.get(1) is None


def test_steps_without_saves_are_bounded() -> None:
    steps = Steps()
    steps.add(step(1, 5))
    for number in range(2, 200):
        steps.add(step(number))
    assert steps.get(1) is not None
    assert len(list(steps)) == 65


def test_a_step_starts_on_the_device_when_the_one_before_ends() -> None:
    steps = Steps()
    assert steps.seconds(step(1), 150) == 50
    steps.finished_ns = 130
    assert steps.seconds(step(1), 150) == 20


def test_what_follows_a_bad_block_is_spoilt_through_shared_tables() -> None:
    assert spoiled({2}, [[1, 2, 3], [9, 3, 4], [5, 6]]) == {2, 3, 4}
    assert spoiled({0}, [[0, 1]]) == set()


@given(st.sets(st.integers(0, 12)), st.lists(TABLE, max_size=5))
def test_spoilt_is_the_smallest_closed_set(bad: set[int], tables: list[list[int]]) -> None:
    spoilt = spoiled(bad, tables)
    assert spoilt >= bad - {0}
    for table in tables:
        first = first_in(table, spoilt)
        assert first is None or spoilt >= set(table[first:]) - {0}
    for block in spoilt - bad:
        less = spoilt - {block}
        assert any(
            (first := first_in(table, less)) is not None and block in table[first:]
            for table in tables
        )
