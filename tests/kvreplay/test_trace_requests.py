"""Requests as tracks of the trace."""

from pathlib import Path
from typing import Any

import pytest

from kvreplay.loading import LogSet
from kvreplay.merge import merge
from kvreplay.trace import trace_events
from kvreplay.trace_requests import RequestTracks
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work
from tests.kvreplay.pair import ENGINE, Pair


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
    assert list(drawn.rest({})) == []


def test_requests_of_an_engine_that_died_end_with_it(tmp_path: Path) -> None:
    """What happens long afterwards does not make them longer; nor the operations of a daemon."""
    pair = Pair(tmp_path, ranks=2)
    pair.slow = {work_do.FindKeys}
    pair.add("a", 100, "x")
    lost: dict[str, Any] = {"engine": f"{ENGINE}#1", "epoch": 1, "reason": "its process ended"}
    pair.worker_event(1, work.PeerLost, role="scheduler", **lost)
    pair.pump()
    died_us = pair.now_ns / 1000
    pair.later(60_000)
    pair.worker_event(1, work.Ticked)
    logs = pair.close()
    first_us = min(entry.at_ns for log in logs.logs for entry in log) / 1000
    (drawn,) = slices(logs)
    assert drawn["ts"] + drawn["dur"] == pytest.approx(died_us - first_us)
    assert drawn["args"]["end"] == "it ended with its process"


def test_what_a_dead_daemon_was_doing_ends_with_it(tmp_path: Path) -> None:
    pair = Pair(tmp_path, ranks=1)
    pair.slow = {work_do.FindKeys}
    pair.add("a", 100, "x")
    pair.say(sched.DaemonLost, rank=0, dead=True, reason="its process ended")
    pair.pump()
    died_us = pair.now_ns / 1000
    pair.later(60_000)
    pair.finish("a")
    logs = pair.close()
    first_us = min(entry.at_ns for log in logs.logs for entry in log) / 1000
    (op,) = [e for e in trace_events(logs) if e.get("name") == "FindKeys" and e["ph"] == "X"]
    assert op["ts"] + op["dur"] == pytest.approx(died_us - first_us)  # type: ignore[operator]
    assert op["args"]["open"] == "it ended with its process"  # type: ignore[index]
