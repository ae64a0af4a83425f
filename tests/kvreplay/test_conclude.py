"""The sentence states the facts."""

from pathlib import Path

import pytest

from kvcommon import messages as msg
from kvcommon import reasons
from kvreplay.conclude import _MISSES, sentence
from kvreplay.facts import Facts, JobFacts
from kvreplay.story import Story, tell
from kvsched.core import events as sched
from tests.kvreplay import scenes


def story(scene: scenes.Scene) -> Story:
    return tell(scene.close(), scenes.REQUEST)


def test_hit(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    told = story(scene)
    assert told.facts.outcome == "hit"
    for fact in ("64 tokens", "4 blocks", "layerwise", "4.0 KiB", "2.500 ms", scenes.REQUEST):
        assert fact in told.sentence


def test_miss_because_not_stored(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.miss(scene)
    told = story(scene)
    assert (told.facts.outcome, told.facts.reason) == ("miss", reasons.NOT_STORED)
    for fact in (
        "nothing from the store",
        "not-stored",
        "block 1 of",
        "4 blocks looked up",
        "0 stored",
    ):
        assert fact in told.sentence


def test_lookup_timeout_tells_when_the_answer_came(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.timeout(scene)
    told = story(scene)
    assert (told.facts.outcome, told.facts.reason) == ("miss", reasons.LOOKUP_TIMEOUT)
    assert "lookup-timeout" in told.sentence
    assert "155.000 ms" in told.sentence


def test_lookup_timeout_without_any_answer(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    scene.tick(100)
    scenes.answer_match(scene, 0, reasons.LOOKUP_TIMEOUT)
    told = story(scene)
    assert "never answered" in told.sentence
    assert "102.000 ms" in told.sentence


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("stored", [None, 3])
def test_what_ended_before_vllm_was_told(stored: int | None, finished: bool) -> None:
    facts = Facts("r", num_looked_up=4, num_stored=stored, finished=finished)
    text = sentence(facts)
    assert ("3 of 4 blocks were stored" in text) == (stored is not None)
    assert ("it ended before" in text) == finished
    assert ("no answer" in text) == (stored is None and not finished)
    assert ("when the logs ended" in text) == (not finished)


def test_store_down(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    scene.sched(sched.StoreChanged(now_ns=scene.tick(), rank=0, up=False, reason="no answer"))
    scenes.answer_match(scene, 0, reasons.STORE_DOWN)
    told = story(scene)
    assert told.facts.reason == reasons.STORE_DOWN
    assert "store-down" in told.sentence
    assert "the store went down (no answer)" in told.sentence


def test_failed_load_names_blocks_rank_and_reason(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.failed_load(scene)
    told = story(scene)
    assert (told.facts.outcome, told.facts.reason) == ("failed-load", reasons.TRANSFER_FAILED)
    for fact in ("2 blocks (23-24)", "rank 0", "transfer-failed", "layerwise", "64 tokens"):
        assert fact in told.sentence


def test_saved_and_tainted(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path / "clean")
    scenes.miss(scene)
    scenes.save(scene, tainted=False, publish=True)
    assert "saved 1 block in step 6" in story(scene).sentence
    scene = scenes.Scene(tmp_path / "tainted")
    scenes.failed_load(scene)
    scenes.save(scene, tainted=True, publish=False)
    told = story(scene)
    assert "save of 1 block in step 6 was revoked" in told.sentence
    assert reasons.TAINTED in told.sentence
    assert "saved" not in told.sentence


def test_cancelled_skipped_and_open_jobs() -> None:
    def job(job_id: int, outcome: msg.JobOutcome | None, reason: str = "") -> JobFacts:
        found = JobFacts(job_id, 3, is_load=False, layerwise=False, num_blocks=2)
        if outcome is not None:
            found.ends[0] = msg.JobEnd(job_id=job_id, outcome=outcome, reason=reason)
        return found

    facts = Facts("r", matched_tokens=0, match_reason=reasons.TOO_SHORT)
    facts.jobs = {
        1: job(1, msg.JobOutcome.SKIPPED, reasons.EXISTS),
        2: job(2, msg.JobOutcome.FAILED, reasons.STORE_FULL),
        3: job(3, None),
    }
    text = sentence(facts)
    assert "did not need to save 2 blocks in step 3 (exists)" in text
    assert "could not save 2 blocks in step 3 (store-full)" in text
    assert "1 save had not ended" in text


def test_a_key_that_the_lookup_did_not_find_and_that_exists_is_somebody_elses() -> None:
    job = JobFacts(1, 3, is_load=False, layerwise=False, num_blocks=2, num_unknown=2)
    job.ends[0] = msg.JobEnd(job_id=1, outcome=msg.JobOutcome.SKIPPED, reason=reasons.EXISTS)
    text = sentence(Facts("r", matched_tokens=0, match_reason=reasons.NOT_STORED, jobs={1: job}))
    assert "did not save 2 blocks in step 3, because somebody else" in text
    assert "dead writer" in text
    assert "did not need" not in text


def test_a_save_is_done_when_every_rank_has_done_it() -> None:
    job = JobFacts(1, 3, is_load=False, layerwise=False, num_blocks=2, lost=[1])
    job.ends[0] = msg.JobEnd(job_id=1, outcome=msg.JobOutcome.DONE)
    text = sentence(Facts("r", jobs={1: job}))
    assert "saved 2 blocks" not in text
    assert "its save of 2 blocks in step 3 was dropped, because the daemon of rank 1" in text


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (Facts("r"), "never looked up"),
        (Facts("r", num_looked_up=3), "no answer when the logs ended"),
        (Facts("r", matched_tokens=32), "offered 32 tokens"),
    ],
)
def test_incomplete_stories(facts: Facts, text: str) -> None:
    assert text in sentence(facts)


@pytest.mark.parametrize("word", sorted(_MISSES))
def test_every_miss_is_one_sentence_with_its_word(word: str) -> None:
    text = sentence(Facts("r", matched_tokens=0, match_reason=word))
    assert f"({word}" in text
    assert text.endswith(".")
    assert text.count(".") == 1
    assert "no reason" not in text
