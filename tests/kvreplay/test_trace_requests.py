"""Requests as tracks of the trace."""

from pathlib import Path
from typing import Any

from kvreplay.loading import LogSet
from kvreplay.merge import merge
from kvreplay.trace import trace_events
from kvreplay.trace_requests import RequestTracks
from tests.kvreplay.pair import Pair


def slices(logs: LogSet) -> list[dict[str, Any]]:
    return [event for event in trace_events(logs) if event.get("cat") == "request"]


def test_a_request_with_its_lookup_and_load_inside(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.put("old", 6)
    pair.serve("req", 100, "old")
    found = slices(pair.close())
    assert [one["name"] for one in found] == ["lookup 1", "load 1", "req"]
    *inner, whole = found
    for one in inner:
        assert one["tid"] == whole["tid"]
        assert whole["ts"] <= one["ts"]
        assert one["ts"] + one["dur"] <= whole["ts"] + whole["dur"]
        assert one["dur"] > 0
    assert whole["args"] == {
        "log": "kvsched-eng1", "tokens": 100, "vLLM was told": "96 tokens", "end": "finished",
    }  # fmt: skip


def test_requests_that_live_at_once_have_tracks_of_their_own(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.add("a", 100, "x")
    pair.add("b", 100, "y")
    pair.finish("a")
    pair.add("c", 100, "z")
    pair.finish("c")
    found = {one["name"]: one for one in slices(pair.close())}
    assert found["a"]["tid"] != found["b"]["tid"]
    assert found["a"]["tid"] == found["c"]["tid"]
    assert found["b"]["args"]["end"] == "not ended in these logs"


def test_an_answer_behind_the_end_of_its_request_is_not_drawn(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.add("a", 100, "x")
    pair.finish("a")
    logs = pair.close()
    drawn = RequestTracks(9)
    events = [event for entry in merge(logs.logs) for event in drawn.take(entry, entry.at_ns / 1e3)]
    named = [event["name"] for event in events if event["ph"] == "M"]
    assert named == ["process_name", "thread_name"]
    assert list(drawn.rest(0.0)) == []
