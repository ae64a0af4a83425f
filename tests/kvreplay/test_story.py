"""A request across both logs."""

import json
from pathlib import Path

import pytest

from kvcommon.eventlog import redact_id
from kvreplay import story
from kvreplay.loading import open_logs
from kvsched.core.events import RequestFinished
from kvworker.core.events import PeerLost
from tests.kvreplay import scenes


def test_lines_are_in_causal_order_with_causes(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.failed_load(scene)
    told = story.tell(scene.close(), scenes.REQUEST)
    events = [line for line in told.lines if line.what == "event"]
    seen: set[str] = set()
    for line in events:
        assert line.cause == "" or line.cause in seen
        seen.add(f"{line.process}:{line.seq}")
    assert {line.process for line in events} == {scenes.SCHED, scenes.WORKER}
    offsets = [line.offset_ns for line in told.lines]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    commands = [line for line in told.lines if line.what == "command"]
    assert all(line.cause == f"{line.process}:{line.seq}" for line in commands)
    kinds = [line.kind for line in told.lines]
    for kind in ("FindKeys", "AnswerMatch", "HoldBlocks", "LoadLayers", "LayersLoaded"):
        assert kind in kinds


def test_a_request_is_found_by_its_unique_start(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.miss(scene)
    scene.sched(RequestFinished(now_ns=scene.tick(), request_id="req-xyz"))
    logs = scene.close()
    assert story.find_request(logs, "req-a") == scenes.REQUEST
    assert story.find_request(logs, scenes.REQUEST) == scenes.REQUEST
    with pytest.raises(story.NoSuchRequestError, match="req-abc, req-xyz"):
        story.find_request(logs, "req-")
    with pytest.raises(story.NoSuchRequestError, match="no request"):
        story.find_request(logs, "zzz")


def test_the_daemons_log_alone_tells_its_part(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.failed_load(scene)
    scene.worker(
        PeerLost(now_ns=scene.tick(), engine=scenes.KEY, role="model", epoch=3, reason="exit")
    )
    scene.close()
    (tmp_path / f"{scenes.SCHED}.0.kvlog").unlink()
    told = story.tell(open_logs([tmp_path]), scenes.REQUEST)
    assert "PeerLost" not in {line.kind for line in told.lines}, "the job was over by then"
    assert told.facts.outcome == "failed-load"
    assert "(23-24)" in told.sentence


def test_json_holds_lines_facts_and_sentence(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    told = story.tell(scene.close(), scenes.REQUEST)
    read = json.loads(json.dumps(told.plain()))
    assert read["facts"]["outcome"] == "hit"
    assert read["facts"]["jobs"][0]["ends"]["0"]["num_bytes"] == 4096
    assert len(read["lines"]) == len(told.lines)
    assert read["sentence"] == told.sentence


def test_a_question_asked_again_and_again_is_one_line(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    for _ in range(5):
        scenes.answer_match(scene, None)
    scenes.answer_lookup(scene, 0, "not-stored")
    scenes.answer_match(scene, None)
    scenes.answer_match(scene, 0, "not-stored")
    told = story.tell(scene.close(), scenes.REQUEST)
    asked = [line for line in told.lines if line.kind == "MatchAsked"]
    assert len(asked) == 3
    assert asked[0].text.endswith("(has 0 of 70 tokens); 5 times, until +6.000 ms")
    assert asked[0].offset_ns == 2 * scenes.MS
    assert "times" not in asked[1].text
    answers = [line.text for line in told.lines if line.kind == "AnswerMatch"]
    assert answers == [
        "answers vLLM: ask again",
        "answers vLLM: ask again",
        "answers vLLM: 0 tokens to load (not-stored)",
    ]
    assert told.num_left_out == 0


def test_long_stories_are_cut_but_not_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story, "MAX_LINES", 3)
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    told = story.tell(scene.close(), scenes.REQUEST)
    assert len(told.lines) == 3
    assert told.num_left_out > 0
    assert "took 64 tokens" in told.sentence


def test_a_hashed_request_is_found_by_its_real_id(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    hashed = redact_id("chatcmpl-7")
    scene.sched(RequestFinished(now_ns=scene.tick(), request_id=hashed))
    assert story.find_request(scene.close(), "chatcmpl-7") == hashed
