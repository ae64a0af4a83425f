"""Rules about bytes: each accepts what is right, names what is wrong, accuses nobody unseen."""

from pathlib import Path
from typing import Any

import pytest

from kvcommon import messages as msg
from kvreplay.block_rules import BlocksAsPlanned, HitsComplete, PublishedComplete
from kvreplay.judge import check_rules
from kvreplay.loading import LogSet
from kvreplay.rules import NothingTaintedPublished
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome
from tests.kvreplay import scenes
from tests.support import playbook

RULES = [BlocksAsPlanned, HitsComplete, PublishedComplete]
KEYS = tuple(scenes.key(one) for one in scenes.HASHES)


def broken(logs: LogSet, *, whole: bool = True) -> list[str]:
    labels = frozenset({scenes.WORKER}) if whole else frozenset()
    return [one.text for one in check_rules(logs.logs, labels, rules=RULES).violations]


def load(scene: scenes.Scene, **changes: Any) -> None:
    scenes.plan(scene, msg.StepPlan(step=5, loads=(scenes.load_job(),)))
    command = {
        "op": 3, "engine": scenes.KEY, "step": 5, "group": 0, "keys": KEYS,
        "block_ids": (21, 22, 23, 24), "first_layer": 0, "end_layer": 2, **changes,
    }  # fmt: skip
    scene.model(msg.StepBegun(step=5), work_do.LoadLayers(**command))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"block_ids": (22, 21, 23, 24)}, "but job 11 names block 21"),
        ({"block_ids": (21, 22, 23, 25)}, "loads into block 25"),
        ({"step": 6}, "which no open job of step 6 names"),
        ({"group": 1}, "which no open job of step 5 names"),
        ({"engine": "eng-2#0"}, "which no open job of step 5 names"),
    ],
)
def test_loads_go_where_the_plan_says(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    scene = scenes.Scene(tmp_path)
    load(scene, **changes)
    logs = scene.close()
    found = broken(logs)
    assert bool(found) == bool(text)
    assert not found or text in found[0]
    assert broken(logs, whole=False) == []


def test_nothing_is_moved_once_its_job_has_ended(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    load(scene)
    ends = msg.JobsEnded(ends=(msg.JobEnd(job_id=11, outcome=msg.JobOutcome.DONE),))
    scene.worker(
        work.Ticked(now_ns=scene.tick()), work_do.SendToScheduler(engine=scenes.KEY, body=ends)
    )
    assert "while op 3 still moves" in broken(scene.close())[0]
    scene = scenes.Scene(tmp_path / "after")
    load(scene)
    loaded = work.LayersLoaded(now_ns=scene.tick(), op=3, outcomes=(Outcome.OK,) * 4, num_bytes=1)
    again = work_do.LoadLayers(
        op=4, engine=scenes.KEY, step=5, group=0, keys=KEYS[:1], block_ids=(21,),
        first_layer=0, end_layer=2,
    )  # fmt: skip
    scene.worker(loaded, work_do.SendToScheduler(engine=scenes.KEY, body=ends), again)
    assert "which no open job of step 5 names" in broken(scene.close())[0]


@pytest.mark.parametrize(("claimed", "right"), [(3, True), (4, False)])
def test_a_hit_is_what_was_found(tmp_path: Path, claimed: int, right: bool) -> None:
    scene = scenes.Scene(tmp_path)
    scene.to_worker(scenes.lookup(), work_do.FindKeys(op=1, engine=scenes.KEY, keys=KEYS))
    result = msg.LookupResult(lookup_id=7, hits=(msg.GroupHit(group=0, num_blocks=claimed),))
    found = (Outcome.OK, Outcome.OK, Outcome.OK, Outcome.MISS)
    scene.worker(
        work.KeysFound(now_ns=scene.tick(), op=1, outcomes=found),
        work_do.SendToScheduler(engine=scenes.KEY, body=result),
    )
    texts = broken(scene.close())
    assert (texts == []) == right
    assert right or "block 4 was found for 0 of 1 ranks" in texts[0]


@pytest.mark.parametrize(
    ("writes", "right"),
    [
        ([(0, 3)], True),
        ([(0, 1), (1, 3)], True),
        ([(0, 2)], False),
        ([(0, 1), (2, 3)], False),
        ([], False),
    ],
)
def test_only_whole_objects_are_published(
    tmp_path: Path, writes: list[tuple[int, int]], right: bool
) -> None:
    scene = scenes.Scene(tmp_path)
    scene.model(
        playbook.attach(), work_do.MapEngine(op=1, engine=scenes.KEY, attach=playbook.attach())
    )
    scenes.plan(scene, msg.StepPlan(step=6, saves=(scenes.save_job(),)))
    key = (scenes.key(b"s" * 32),)
    scene.model(
        msg.StepBegun(step=6),
        work_do.OpenPuts(op=2, engine=scenes.KEY, step=6, group=0, keys=key),
    )
    for op, (first, end) in enumerate(writes, start=3):
        scene.model(
            msg.LayersComputed(step=6, num_layers=end),
            work_do.WriteLayers(
                op=op, engine=scenes.KEY, step=6, group=0, keys=key, block_ids=(25,),
                first_layer=first, end_layer=end,
            ),
        )  # fmt: skip
        scene.worker(
            work.LayersWritten(now_ns=scene.tick(), op=op, outcomes=(Outcome.OK,), num_bytes=(1,))
        )
    scene.to_worker(
        msg.StepVerdict(step=6), work_do.ClosePuts(op=9, engine=scenes.KEY, step=6, end=key)
    )
    texts = broken(scene.close())
    assert (texts == []) == right
    assert right or "of 3 layers written" in texts[0]


@pytest.mark.parametrize(
    ("layers", "verdict", "texts"),
    [
        ((0, 3), True, []),
        ((0, 2), True, ["publishes layers 0 to 1 of 3"]),
        ((1, 3), True, ["publishes layers 1 to 2 of 3"]),
        ((0, 3), False, ["step 6 is published without a verdict"]),
    ],
)
def test_without_sessions_writing_is_publishing(
    tmp_path: Path, layers: tuple[int, int], verdict: bool, texts: list[str]
) -> None:
    scene = scenes.Scene(tmp_path)
    scene.model(
        playbook.attach(), work_do.MapEngine(op=1, engine=scenes.KEY, attach=playbook.attach())
    )
    scenes.plan(scene, msg.StepPlan(step=6, saves=(scenes.save_job(),)))
    key = (scenes.key(b"s" * 32),)
    write = work_do.WriteLayers(
        op=2, engine=scenes.KEY, step=6, group=0, keys=key, block_ids=(25,),
        first_layer=layers[0], end_layer=layers[1], whole=True,
    )  # fmt: skip
    if verdict:
        scene.to_worker(msg.StepVerdict(step=6), write)
    else:
        scene.model(msg.LayersComputed(step=6, num_layers=3), write)
    rules = [PublishedComplete, NothingTaintedPublished]
    found = check_rules(scene.close().logs, frozenset({scenes.WORKER}), rules=rules).violations
    assert len(found) == len(texts)
    assert all(text in one.text for text, one in zip(texts, found, strict=True))
