"""All stories at once are those told one by one."""

from pathlib import Path

import pytest

from kvcommon import messages as msg
from kvreplay import requests
from kvreplay.requests import read_requests
from kvreplay.story import tell
from kvsched.core import events as sched
from tests.kvreplay.pair import Pair


def test_all_at_once_is_one_by_one(tmp_path: Path) -> None:
    pair = Pair(tmp_path, ranks=2)
    pair.put("old", 3, [0])
    for number, text in enumerate(["old", "b", "old", "b"]):
        pair.serve(f"req-{number}", 100 + number, text, step=3 * number + 1, first_block=10)
    logs = pair.close()
    stories = read_requests(logs)
    assert [story.request_id for story in stories] == [f"req-{number}" for number in range(4)]
    for story in stories:
        alone = tell(logs, story.request_id)
        assert (story.lines, story.sentence) == (alone.lines, alone.sentence)
    assert stories[0].facts.missing_ranks == [1]


def test_requests_that_overlap_keep_what_is_theirs(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.add("a", 100, "x")
    pair.add("b", 100, "y")
    pair.ask("a", 100)
    pair.say(sched.DaemonLost, rank=0, dead=True, reason="its process ended")
    pair.ask("b", 100)
    pair.finish("a")
    pair.finish("b")
    logs = pair.close()
    for story in read_requests(logs):
        assert story.facts.lost == ["the daemon of rank 0 was lost (its process ended)"]
        assert story.lines == tell(logs, story.request_id).lines


def test_what_comes_after_the_end_is_still_told(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.add("a", 100, "x")
    pair.finish("a")
    result = msg.LookupResult(lookup_id=1, hits=(), reason="late")
    pair.say(sched.LookupAnswered, rank=0, result=result)
    (story,) = read_requests(pair.close())
    kinds = [line.kind for line in story.lines if line.what == "event"]
    assert kinds[-1] == "LookupAnswered"


def test_numbers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path)
    for number in range(5):
        pair.add(f"req-{number}", 100, "x")
    logs = pair.close()
    told = read_requests(logs, max_requests=3)
    assert (len(told), told.num_left_out) == (3, 2)
    assert read_requests(logs).num_left_out == 0
    monkeypatch.setattr(requests, "MAX_LINES", 2)
    (first, *_) = read_requests(logs)
    assert len(first.lines) == 2
    assert first.num_left_out > 0
