"""Counting."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvcommon import messages as msg
from kvreplay.stats import Histogram, gather
from kvsched.core import events as sched
from tests.kvreplay import scenes


def test_a_hit_and_a_clean_save_are_counted(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    scenes.save(scene, tainted=False, publish=True)
    found = json.loads(json.dumps(gather(scene.close()).plain()))
    assert (found["requests"], found["tokens"], found["external_tokens"]) == (1, 70, 64)
    assert (found["hit_rate"], found["answers"]) == (1.0, {"hit": 1})
    assert (found["loaded_bytes"], found["saved_bytes"]) == (4096, 1024)
    assert found["jobs"] == [
        {"kind": "load", "outcome": "done", "reason": "", "num": 1},
        {"kind": "save", "outcome": "done", "reason": "", "num": 1},
    ]
    assert found["phases_ms"]["lookup"]["max"] == 4.0
    assert found["phases_ms"]["LoadLayers"]["max"] == 3.0
    assert set(found["phases_ms"]) >= {"FindKeys", "ClosePuts", "load job", "save job"}


def test_reasons_of_misses_and_failures(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.miss(scene)
    scenes.save(scene, tainted=True, publish=False)
    found = gather(scene.close()).plain()
    assert found["answers"] == {"not-stored": 1}
    assert found["hit_rate"] == 0.0
    assert found["jobs"] == [
        {"kind": "save", "outcome": "cancelled", "reason": "tainted", "num": 1}
    ]


def test_what_a_daemon_took_along_has_failed(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    for epoch in (2, 3):
        scenes.plan(scene, msg.StepPlan(step=6, saves=(scenes.save_job(),)))
        scene.sched(
            sched.DaemonReady(now_ns=scene.tick(), rank=0, epoch=epoch, attached=True)
        )
    scenes.plan(scene, msg.StepPlan(step=9, loads=(scenes.load_job(),)))
    lost = sched.DaemonLost(now_ns=scene.tick(), rank=0, dead=True, reason="killed")
    scene.sched(lost)
    scene.sched(lost)
    assert gather(scene.close()).jobs == {
        ("load", "done", ""): 1,
        ("load", "failed", "daemon-lost"): 1,
        ("save", "failed", "daemon-lost"): 1,
    }


def test_an_unfinished_request_counts_with_its_last_answer(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    scenes.answer_match(scene, 0, "store-down")
    scenes.answer_match(scene, 64)
    assert gather(scene.close()).answers == {"hit": 1}


def test_nothing_is_counted_from_nothing(tmp_path: Path) -> None:
    found = gather(scenes.Scene(tmp_path).close()).plain()
    assert found["hit_rate"] == 0.0
    assert found["seconds"] == 0


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50), st.floats(0.01, 1))
def test_quantiles_are_right_to_a_tenth(durations: list[int], share: float) -> None:
    histogram = Histogram()
    for duration in durations:
        histogram.add(duration)
    rank = next(n for n in range(1, len(durations) + 1) if n >= share * len(durations))
    exact = sorted(durations)[rank - 1]
    assert abs(histogram.quantile_ns(share) - exact) <= 0.1 * exact + 1
    assert histogram.max_ns == max(durations)
