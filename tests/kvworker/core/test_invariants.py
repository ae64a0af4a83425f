"""Each invariant is seen to be broken when it is."""

import pytest

from kvworker.core.commands import ClosePuts, OpenGets, OpenPuts, WriteLayers
from kvworker.core.invariants import check
from kvworker.core.parts import Parts
from kvworker.core.states import JobState, MapState
from tests.support.playbook import Playbook, key, load, only, save, started


def parts_of(play: Playbook) -> Parts:
    parts = play.core._parts
    check(parts)
    return parts


def saving() -> tuple[Playbook, Parts]:
    play = started()
    play.plan(1, save(1, {4: 40}))
    play.answer(only(play.begin(1), OpenPuts))
    return play, parts_of(play)


def loading() -> tuple[Playbook, Parts]:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40})), OpenGets))
    play.begin(1)
    return play, parts_of(play)


def test_a_job_in_two_batches() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}))
    play.plan(2, save(2, {5: 50}))
    parts = parts_of(play)
    parts.saves.batches[1].jobs.append(parts.saves.batches[0].jobs[0])
    with pytest.raises(AssertionError, match="two batches"):
        check(parts)


def test_a_job_that_is_lost() -> None:
    _, parts = saving()
    parts.saves.batches[0].jobs.clear()
    with pytest.raises(AssertionError, match="open jobs and batches differ"):
        check(parts)


def test_a_job_that_ended_and_is_open() -> None:
    _, parts = saving()
    parts.saves.batches[0].jobs[0].state = JobState.ENDED
    with pytest.raises(AssertionError, match="open and ended"):
        check(parts)


def test_two_puts_on_one_key() -> None:
    play = started()
    play.begin(1)
    play.answer(only(play.plan(1, save(1, {4: 40})), OpenPuts))
    play.answer(only(play.plan(1, save(2, {5: 50})), OpenPuts))
    parts = parts_of(play)
    parts.saves.batches[1].jobs[0].blocks[0].key = key(40)
    with pytest.raises(AssertionError, match="two puts are open"):
        check(parts)


def test_a_publication_of_bytes_that_are_missing() -> None:
    play, parts = saving()
    play.answer(only(play.computed(1), WriteLayers))
    only(play.verdict(1), ClosePuts)
    parts.saves.batches[0].jobs[0].blocks[0].num_bytes -= 1
    with pytest.raises(AssertionError, match="bytes missing"):
        check(parts)


def test_a_publication_without_a_verdict() -> None:
    play, parts = saving()
    play.answer(only(play.computed(1), WriteLayers))
    play.verdict(1)
    parts.saves.batches[0].verdict = False
    with pytest.raises(AssertionError, match="without a verdict"):
        check(parts)


def test_a_publication_of_what_was_given_up() -> None:
    play, parts = saving()
    play.answer(only(play.computed(1), WriteLayers))
    play.verdict(1)
    parts.saves.batches[0].jobs[0].state = JobState.CANCELLING
    with pytest.raises(AssertionError, match="given up and is published"):
        check(parts)


def test_references_that_do_not_balance() -> None:
    _, parts = loading()
    parts.loads.references[key(40)] += 1
    with pytest.raises(AssertionError, match="balance"):
        check(parts)


def test_a_load_before_its_gate() -> None:
    _, parts = loading()
    parts.loads.batches[0].engine.progress.begun = 0
    with pytest.raises(AssertionError, match="before its gate"):
        check(parts)


def test_work_on_memory_that_is_gone() -> None:
    _, parts = loading()
    parts.loads.batches[0].incarnation -= 1
    with pytest.raises(AssertionError, match="not mapped"):
        check(parts)


def test_a_mapping_without_its_operation() -> None:
    _, parts = loading()
    next(iter(parts.engines)).state = MapState.UNMAPPING
    with pytest.raises(AssertionError):
        check(parts)


def test_an_operation_that_belongs_to_nothing() -> None:
    play, parts = saving()
    play.computed(1)
    parts.saves.batches[0].op = 99
    with pytest.raises(AssertionError, match="operations and their owners differ"):
        check(parts)


def test_a_batch_that_is_not_counted() -> None:
    _, parts = saving()
    next(iter(parts.engines)).num_batches = 0
    with pytest.raises(AssertionError):
        check(parts)
