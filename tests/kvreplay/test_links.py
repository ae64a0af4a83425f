"""Which records belong to a request."""

from pathlib import Path

import msgspec

from kvcommon import messages as msg
from kvreplay.links import Mentions, RequestLinks
from kvreplay.merge import merge
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work
from tests.kvreplay import scenes


def other_request(scene: scenes.Scene) -> None:
    """A request with other blocks, whose records must not be taken."""
    scene.sched(
        sched.RequestAdded(
            now_ns=scene.tick(), request_id="other", num_tokens=9, block_hashes=(b"o" * 32,)
        )
    )
    job = msg.SaveJob(
        job_id=50, request_id="other", group=0, block_ids=(60,), block_hashes=(b"o" * 32,)
    )
    scene.to_worker(
        msg.StepPlan(step=90, saves=(job,)),
        work_do.OpenPuts(op=70, engine=scenes.KEY, step=90, group=0, keys=(scenes.key(b"o" * 32),)),
    )
    ends = (msg.JobEnd(job_id=50, outcome=msg.JobOutcome.SKIPPED),)
    scene.worker(
        work.PutsOpened(now_ns=scene.tick(), op=70, outcomes=()),
        work_do.SendToScheduler(engine=scenes.KEY, body=msg.JobsEnded(ends=ends)),
    )


def test_all_records_of_a_hit_are_its_own(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    links = RequestLinks(scenes.REQUEST)
    entries = list(merge(scene.close().logs))
    touches = [links.touch(entry) for entry in entries]
    assert all(touch.event for touch in touches)
    assert [len(touch.commands) for touch in touches] == [len(e.commands) for e in entries]
    assert links.engine == scenes.ENGINE
    assert set(links.jobs) == {11}
    assert not links.alive


def test_records_of_another_request_are_left_out(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    other_request(scene)
    scenes.answer_lookup(scene, 0, "not-stored")
    links = RequestLinks(scenes.REQUEST)
    touched = [entry.stimulus for entry in merge(scene.close().logs) if links.touch(entry)]
    assert touched == ["kvsched-1:1", "kvworker-1:1", "kvworker-1:4", "kvsched-1:3"]


def test_same_ids_on_another_engine_are_left_out(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    result = msg.LookupResult(lookup_id=7, hits=())
    scene.worker(
        work.Ticked(now_ns=scene.tick()),
        work_do.SendToScheduler(engine="eng-2#0", body=result),
    )
    links = RequestLinks(scenes.REQUEST)
    *_, last = [links.touch(entry) for entry in merge(scene.close().logs)]
    assert not last


def test_another_lookup_of_the_same_blocks_is_left_out(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    twin = msgspec.structs.replace(scenes.lookup(), lookup_id=8, request_id="twin")
    keys = tuple(scenes.key(one) for one in scenes.HASHES)
    for op in (50, 51):
        scene.to_worker(twin, work_do.FindKeys(op=op, engine=scenes.KEY, keys=keys))
        if op == 50:
            scenes.answer_lookup(scene, 4)
    scene.worker(
        work.KeysFound(now_ns=scene.tick(), op=50, outcomes=()),
        work_do.FindKeys(op=52, engine=scenes.KEY, keys=keys),
    )
    links = RequestLinks(scenes.REQUEST)
    touched = [entry.stimulus for entry in merge(scene.close().logs) if links.touch(entry)]
    assert touched == ["kvsched-1:1", "kvworker-1:1", "kvworker-1:3", "kvsched-1:2"]


def test_weather_belongs_to_a_request_while_it_lives(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    lost = sched.DaemonLost(now_ns=scene.tick(), rank=0, dead=True, reason="x")
    scene.sched(lost)
    scenes.add_request(scene)
    scene.sched(lost)
    scenes.finish(scene)
    scene.sched(lost)
    links = RequestLinks(scenes.REQUEST)
    touched = {e.stimulus: bool(links.touch(e)) for e in merge(scene.close().logs)}
    assert [touched[f"{scenes.SCHED}:{seq}"] for seq in (1, 3, 5)] == [False, True, False]


def test_mentions_name_the_requests_of_every_record_of_a_hit(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    mentions = Mentions()
    found = {e.stimulus: mentions.of(e) for e in merge(scene.close().logs)}
    unnamed = [stimulus for stimulus, requests in found.items() if not requests]
    assert all(requests <= {scenes.REQUEST} for requests in found.values())
    assert mentions.job(11) == scenes.REQUEST
    assert mentions.job(999) == ""
    assert not unnamed


def test_mentions_keep_engines_apart(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    twin = msg.SaveJob(
        job_id=11, request_id="twin", group=0, block_ids=(1,), block_hashes=scenes.HASHES[:1]
    )
    for engine, step_plan in (
        ("eng-2#0", msg.StepPlan(step=5, saves=(twin,))),
        (scenes.KEY, msg.StepPlan(step=5, loads=(scenes.load_job(),))),
    ):
        scene.worker(
            work.SchedulerSaid(now_ns=scene.tick(), engine=engine, epoch=9, body=step_plan)
        )
    ends = (msg.JobEnd(job_id=11, outcome=msg.JobOutcome.DONE),)
    scene.worker(
        work.Ticked(now_ns=scene.tick()),
        work_do.SendToScheduler(engine="eng-2#0", body=msg.JobsEnded(ends=ends)),
    )
    mentions = Mentions()
    *_, last = [mentions.of(entry) for entry in merge(scene.close().logs)]
    assert last == {"twin"}
    assert mentions.job(11, last) == "twin"
    assert mentions.job(11, frozenset({scenes.REQUEST})) == scenes.REQUEST


def test_a_step_of_the_same_number_on_another_engine_is_left_out(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.plan(scene, msg.StepPlan(step=5, loads=(scenes.load_job(),)))
    other = work.ModelSaid(
        now_ns=scene.tick(), engine="eng-2#0", epoch=1, body=msg.StepBegun(step=5)
    )
    scene.worker(other)
    links = RequestLinks(scenes.REQUEST)
    *_, last = [links.touch(entry) for entry in merge(scene.close().logs)]
    assert not last
