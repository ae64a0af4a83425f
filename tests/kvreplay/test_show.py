"""Filters."""

import json
from pathlib import Path

import pytest

from kvcommon import messages as msg
from kvreplay.links import Mentions
from kvreplay.show import Filters, as_plain, jobs_of, kinds_of, select, step_of
from kvsched.core import commands as sched_do
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome
from tests.kvreplay import scenes


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(), 21),
        (Filters(request=scenes.REQUEST), 21),
        (Filters(request="nobody"), 0),
        (Filters(job=12), 4),
        (Filters(job=11), 4),
        (Filters(step=6), 9),
        (Filters(kind="steplan"), 0),
        (Filters(kind="StepPlan"), 4),
        (Filters(kind="loadlayers"), 1),
        (Filters(kind="LayersLoaded", step=5), 1),
        (Filters(request=scenes.REQUEST, kind="FreeBlocks"), 2),
    ],
)
def test_filters(tmp_path: Path, filters: Filters, expected: int) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    scenes.answer_lookup(scene, 4)
    scenes.answer_match(scene, 64)
    end = msg.JobEnd(job_id=11, outcome=msg.JobOutcome.DONE, num_bytes=1)
    scenes.load(scene, end, (Outcome.OK,) * 4)
    scenes.save(scene, tainted=False, publish=True)
    logs = scene.close()
    assert len(list(select(logs, filters))) == expected


def test_idle_ticks_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scene.worker(work.Ticked(now_ns=scene.tick()))
    scene.worker(work.Ticked(now_ns=scene.tick()), work_do.ProbeStore(op=1))
    logs = scene.close()
    assert [entry.seq for entry in select(logs, Filters())] == [2]
    assert [entry.seq for entry in select(logs, Filters(ticks=True))] == [1, 2]


def test_a_record_as_json_names_its_requests(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    mentions = Mentions()
    rows = [as_plain(entry, mentions) for entry in select(scene.close(), Filters())]
    read = json.loads(json.dumps(rows))
    assert all(row["requests"] == [scenes.REQUEST] for row in read)
    assert read[0]["event"]["type"] == "RequestAdded"
    assert read[0]["commands"][0]["body"]["type"] == "Lookup"


def test_what_a_record_is_about(tmp_path: Path) -> None:
    plan = msg.StepPlan(step=4, loads=(scenes.load_job(),), saves=(scenes.save_job(),))
    send = sched_do.SendToDaemon(rank=0, body=plan)
    assert step_of(send) == 4
    assert jobs_of(send) == {11, 12}
    assert step_of(None) is None
    assert jobs_of(msg.StepVerdict(step=1, tainted=(3,))) == {3}
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    first = next(iter(scene.close().logs[0]))
    assert kinds_of(first) == {"requestadded", "sendtodaemon", "lookup"}


def test_times_are_counted_from_the_first_record(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    logs = scene.close()
    whole = list(select(logs, Filters()))
    first = whole[0].at_ns
    ms = scenes.MS
    part = list(select(logs, Filters(from_ns=3 * ms, to_ns=6 * ms)))
    assert [(entry.at_ns - first) // ms for entry in part] == [3, 4, 5]
    assert part == whole[3:6]
