"""Saves into a store that takes whole objects: nothing before the verdict, then one call."""

from kvcommon.messages import JobOutcome
from kvworker.core.commands import ClosePuts, OpenPuts, WriteLayers
from kvworker.outcome import Outcome
from tests.support.playbook import NUM_LAYERS, OBJECT_BYTES, Playbook, ends, key, kinds, only, save
from tests.support.playbook import started as attached


def opened(play: Playbook, *jobs: object) -> None:
    play.plan(1, *jobs)  # type: ignore[arg-type]
    assert kinds(play.answer(only(play.begin(1), OpenPuts), whole=True)) == []


def test_stored_in_one_call_after_the_verdict() -> None:
    play = attached()
    opened(play, save(1, {4: 40, 5: 50}))
    assert kinds(play.computed(1)) == []
    write = only(play.verdict(1), WriteLayers)
    assert write.whole
    assert (write.first_layer, write.end_layer) == (0, NUM_LAYERS)
    assert (write.keys, write.block_ids) == ((key(40), key(50)), (4, 5))
    end = ends(play.answer(write, started_ns=play.now_ns))[1]
    assert end.outcome is JobOutcome.DONE
    assert end.num_bytes == 2 * OBJECT_BYTES
    # The keys can be written again: nothing was left open.
    assert only(play.plan(2, save(2, {6: 40})) + play.begin(2), OpenPuts).keys == (key(40),)


def test_a_tainted_job_is_never_written() -> None:
    play = attached()
    opened(play, save(1, {4: 40}), save(2, {5: 50}))
    play.computed(1)
    commands = play.verdict(1, 1)
    write = only(commands, WriteLayers)
    assert write.keys == (key(50),)
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert ends(play.answer(write))[2].outcome is JobOutcome.DONE


def test_a_batch_that_is_tainted_whole_needs_no_store() -> None:
    play = attached()
    opened(play, save(1, {4: 40}))
    play.computed(1)
    commands = play.verdict(1, 1)
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert not [c for c in commands if isinstance(c, (WriteLayers, ClosePuts))]


def test_the_verdict_waits_for_the_layers() -> None:
    play = attached()
    opened(play, save(1, {4: 40}))
    assert kinds(play.verdict(1)) == []
    assert kinds(play.computed(1, NUM_LAYERS - 1)) == []
    assert only(play.computed(1), WriteLayers).whole


def test_layers_that_never_come_are_never_published() -> None:
    play = attached()
    opened(play, save(1, {4: 40}))
    play.computed(1, 1)
    play.verdict(1)
    commands = play.begin(2)
    assert ends(commands)[1].outcome is JobOutcome.FAILED
    assert not [c for c in commands if isinstance(c, (WriteLayers, ClosePuts))]


def test_failures_of_single_objects() -> None:
    play = attached()
    opened(play, save(1, {4: 40}), save(2, {5: 50}), save(3, {6: 60}))
    play.computed(1)
    write = only(play.verdict(1), WriteLayers)
    got = ends(play.answer(write, [Outcome.FULL, Outcome.EXISTS, Outcome.OK]))
    assert (got[1].outcome, got[1].failed_blocks) == (JobOutcome.FAILED, (4,))
    assert got[2].outcome is JobOutcome.SKIPPED
    assert got[3].outcome is JobOutcome.DONE


def test_the_model_side_is_lost_before_the_verdict() -> None:
    play = attached()
    opened(play, save(1, {4: 40}))
    play.computed(1)
    commands = play.lose("model")
    assert ends(commands)[1].outcome is JobOutcome.CANCELLED
    assert not [c for c in commands if isinstance(c, ClosePuts)]
