"""The trace is what Chrome's format asks for, and shows what happened."""

import io
import json
from pathlib import Path
from typing import Any

from kvcommon import messages as msg
from kvreplay.trace import write_trace
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work
from tests.kvreplay import scenes

NUMBER = (int, float)


def events(scene: scenes.Scene) -> list[dict[str, Any]]:
    out = io.StringIO()
    count = write_trace(scene.close(), out)
    read = json.loads(out.getvalue())
    assert len(read["traceEvents"]) == count
    found: list[dict[str, Any]] = read["traceEvents"]
    return found


def test_every_event_is_well_formed_and_on_a_named_track(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.failed_load(scene)
    scenes.save(scene, tainted=True, publish=False)
    named: set[tuple[int, int]] = set()
    for event in events(scene):
        assert event["ph"] in {"M", "X", "i", "s", "f"}
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"]))
            continue
        assert (event["pid"], event["tid"]) in named
        assert isinstance(event["ts"], NUMBER)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0


def test_ops_layers_steps_and_arrows(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    found = events(scene)
    slices = {e["name"]: e for e in found if e["ph"] == "X"}
    load = slices["LoadLayers"]
    assert load["dur"] == 3000
    assert load["args"]["waited_us"] == 1000
    assert load["args"]["requests"] == scenes.REQUEST
    assert slices["layer 0"]["dur"] == 1000
    assert slices["layer 1"]["ts"] == slices["layer 0"]["ts"] + 1000
    assert slices["layer 1"]["ts"] + slices["layer 1"]["dur"] == load["ts"] + 3000
    assert any(e["name"] == "step 5 begun" for e in found if e["ph"] == "i")
    (start,) = [e for e in found if e["ph"] == "s"]
    ends = [e for e in found if e["ph"] == "f"]
    assert {e["id"] for e in ends} == {start["id"]}
    assert load["tid"] in {e["tid"] for e in ends}
    plan = slices["plan of step 5"]
    assert plan["ts"] <= start["ts"] <= plan["ts"] + plan["dur"]


def test_slices_of_a_track_do_not_overlap(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    for op in (1, 2):
        scene.worker(work.Ticked(now_ns=scene.tick()), work_do.ProbeStore(op=op))
    for op in (1, 2):
        scene.worker(work.StoreProbed(now_ns=scene.tick(), op=op, state=msg.StoreState.UP))
    scene.worker(work.Ticked(now_ns=scene.tick()), work_do.ProbeStore(op=3))
    slices = [e for e in events(scene) if e["ph"] == "X"]
    assert len({e["tid"] for e in slices}) == 2
    assert [e["args"].get("open", "") for e in slices] == ["", "", "not ended in these logs"]


def test_a_core_fault_is_marked(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    writer = scene.writers[scenes.SCHED]
    writer.record(1, "", sched.Ticked(now_ns=scene.tick()), (), "ValueError: x")
    assert any(e["name"] == "core failed: ValueError: x" for e in events(scene))
