"""Why something never ended."""

from pathlib import Path

from kvcommon import messages as msg
from kvreplay.fates import Fates
from kvreplay.judge import check_rules
from kvreplay.loading import LogSet
from kvreplay.merge import merge
from kvsched.core import events as sched
from kvworker.core import events as work
from tests.kvreplay import scenes

#: Of the daemon and of the scheduler side in ``scenes``.
DAEMON, ENGINE = 2, 1


def fates(logs: LogSet) -> Fates:
    found = Fates(logs.logs)
    for entry in merge(logs.logs):
        found.add(entry)
    return found


def ready(scene: scenes.Scene, epoch: int = DAEMON) -> None:
    scene.sched(sched.DaemonReady(now_ns=scene.tick(), rank=0, epoch=epoch, attached=True))


def test_what_is_open_while_all_live_is_only_open(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    ready(scene)
    scene.sched(sched.DaemonLost(now_ns=scene.tick(), rank=0, dead=False, reason="silence"))
    found = fates(scene.close())
    assert found.of(scenes.WORKER, scenes.KEY, 11) == ""
    assert found.of(scenes.SCHED) == ""


def test_a_dead_daemon_takes_its_jobs_along(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    ready(scene)
    scene.sched(sched.DaemonLost(now_ns=scene.tick(), rank=0, dead=True, reason="killed"))
    found = fates(scene.close())
    assert found.of(scenes.WORKER, scenes.KEY, 11) == "it ended with its process"
    assert found.of(scenes.SCHED) == ""
    assert found.has_died(scenes.WORKER)
    assert not found.has_died(scenes.SCHED)


def test_the_successor_of_a_daemon_proves_its_death(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    ready(scene)
    ready(scene, epoch=DAEMON + 50)
    assert fates(scene.close()).of(scenes.WORKER) == "it ended with its process"


def test_an_end_that_the_engine_heard_of_is_missing_from_the_log_only(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    ready(scene)
    ends = (msg.JobEnd(job_id=11, outcome=msg.JobOutcome.DONE),)
    scene.sched(sched.JobsReported(now_ns=scene.tick(), rank=0, ends=ends))
    scene.sched(sched.DaemonLost(now_ns=scene.tick(), rank=0, dead=True, reason="killed"))
    found = fates(scene.close())
    assert "the engine heard of its end" in found.of(scenes.WORKER, scenes.KEY, 11)
    assert found.of(scenes.WORKER, scenes.KEY, 12) == "it ended with its process"


def test_a_dead_engine_takes_its_jobs_along(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    for role, epoch in (("model", 3), ("scheduler", ENGINE)):
        lost = work.PeerLost(
            now_ns=scene.tick(), engine=scenes.KEY, role=role, epoch=epoch, reason="its process"
        )
        scene.worker(lost)
    found = fates(scene.close())
    assert found.of(scenes.WORKER, scenes.KEY, 11) == "it was dropped with its engine (its process)"
    assert found.of(scenes.WORKER, "another#0", 11) == ""
    assert found.of(scenes.SCHED) == "it ended with its process"


def test_verify_says_why_a_job_never_ended(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    ready(scene)
    scenes.plan(scene, msg.StepPlan(step=6, saves=(scenes.save_job(),)))
    scene.sched(sched.DaemonLost(now_ns=scene.tick(), rank=0, dead=True, reason="killed"))
    logs = scene.close().logs
    still = check_rules(logs, frozenset(log.label for log in logs)).open
    texts = [one.sentence for one in still]
    assert f"{scenes.WORKER}: job 12 on {scenes.KEY}: it ended with its process" in texts
    assert f"{scenes.SCHED}: open at the end: blocks 25 held for job 12" in texts
