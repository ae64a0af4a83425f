"""Each rule accepts what is right and names what is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvcommon import messages as msg
from kvreplay.judge import Judgement, check_rules
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome
from tests.kvreplay import scenes

WHOLE = frozenset({scenes.SCHED, scenes.WORKER})
DONE = msg.JobEnd(job_id=11, outcome=msg.JobOutcome.DONE, num_bytes=8)


def judge(scene: scenes.Scene, whole: frozenset[str] = WHOLE) -> Judgement:
    return check_rules(scene.close().logs, whole)


def broken(scene: scenes.Scene) -> list[tuple[str, str]]:
    return [(one.rule, one.text) for one in judge(scene).violations]


def find(scene: scenes.Scene, *ops: int) -> None:
    commands = [work_do.FindKeys(op=op, engine=scenes.KEY, keys=("k",)) for op in ops]
    scene.worker(work.Ticked(now_ns=scene.tick()), *commands)


@pytest.mark.parametrize(
    "play",
    [
        scenes.hit,
        scenes.miss,
        scenes.timeout,
        scenes.failed_load,
        lambda scene: scenes.save(scene, tainted=True, publish=False),
        lambda scene: scenes.save(scene, tainted=False, publish=True),
    ],
)
def test_right_histories_break_no_rule(
    tmp_path: Path, play: Callable[[scenes.Scene], None]
) -> None:
    scene = scenes.Scene(tmp_path)
    play(scene)
    judgement = judge(scene)
    assert judgement.violations == []
    assert judgement.open == []


def test_an_op_that_ends_twice(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    find(scene, 1)
    for _ in range(2):
        scene.worker(work.KeysFound(now_ns=scene.tick(), op=1, outcomes=(Outcome.OK,)))
    assert broken(scene) == [("op-ends-once", "op 1 ended twice")]


def test_an_op_that_was_never_started(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scene.worker(work.GetsClosed(now_ns=scene.tick(), op=9))
    assert broken(scene) == [("op-ends-once", "op 9 ended but never started")]


def test_an_op_that_is_answered_by_another_kind(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    find(scene, 1)
    scene.worker(work.GetsClosed(now_ns=scene.tick(), op=1))
    assert broken(scene) == [("op-ends-once", "op 1 is a FindKeys, answered by GetsClosed")]


def test_an_op_number_that_is_used_again(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    find(scene, 1, 1)
    assert broken(scene) == [("op-ends-once", "op 1 was started again while it runs")]


def test_what_runs_at_the_end_is_open_not_wrong(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    find(scene, 3)
    scenes.plan(scene, msg.StepPlan(step=5, loads=(scenes.load_job(),)))
    judgement = judge(scene)
    assert judgement.violations == []
    assert sorted(one.text for one in judgement.open) == [
        "blocks 21-24 held for job 11",
        "job 11 on eng-1#0",
        "op 3 (FindKeys)",
    ]


def test_nothing_is_judged_by_what_a_log_does_not_hold(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scene.worker(work.GetsClosed(now_ns=scene.tick(), op=9))
    scenes.end_jobs(scene, work.Ticked(now_ns=scene.tick()), DONE)
    load = work_do.LoadLayers(
        op=10,
        engine=scenes.KEY,
        step=5,
        group=0,
        keys=(),
        block_ids=(),
        first_layer=0,
        end_layer=1,
    )
    scene.worker(work.Ticked(now_ns=scene.tick()), load)
    assert judge(scene, frozenset()).violations == []


def test_a_job_that_ends_twice_or_was_not_planned(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.plan(scene, msg.StepPlan(step=5, loads=(scenes.load_job(),)))
    scenes.end_jobs(scene, work.Ticked(now_ns=scene.tick()), DONE)
    scenes.end_jobs(scene, work.Ticked(now_ns=scene.tick()), DONE, free=False)
    other = msg.JobEnd(job_id=77, outcome=msg.JobOutcome.DONE)
    scenes.end_jobs(scene, work.Ticked(now_ns=scene.tick()), other, free=False)
    judgement = judge(scene)
    assert [(one.rule, one.text) for one in judgement.violations] == [
        ("job-ends-once", "job 11 ended twice on eng-1#0"),
        ("job-ends-once", "job 77 ended on eng-1#0 but was never planned there"),
    ]
    assert judgement.violations[0].request == scenes.REQUEST


def test_a_hello_may_ask_for_an_end_again(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.plan(scene, msg.StepPlan(step=5, loads=(scenes.load_job(),)))
    scenes.end_jobs(scene, work.Ticked(now_ns=scene.tick()), DONE)
    hello = msg.Hello(pid=1, ranks=(), open_jobs=(11, 78))
    ends = (DONE, msg.JobEnd(job_id=78, outcome=msg.JobOutcome.CANCELLED))
    answer = work_do.SendToScheduler(engine=scenes.KEY, body=msg.JobsEnded(ends=ends))
    scene.to_worker(hello, answer)
    scene.worker(work.Ticked(now_ns=scene.tick()), answer)
    assert [text for _, text in broken(scene)] == [
        "job 11 ended twice on eng-1#0",
        "job 78 ended twice on eng-1#0",
    ], "once more is right, twice more is not"


def test_blocks_freed_before_the_end(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.plan(scene, msg.StepPlan(step=5, loads=(scenes.load_job(),)))
    scene.sched(
        sched.Ticked(now_ns=scene.tick()),
        sched_do.FreeBlocks(job_id=11, block_ids=(21, 22, 23, 24)),
    )
    assert broken(scene) == [
        ("free-after-ends", "blocks of job 11 are given back before rank 0 has ended it")
    ]


@pytest.mark.parametrize(
    ("events", "num_broken"),
    [
        ([sched.DaemonLost(now_ns=0, rank=0, dead=True, reason="x")], 0),
        ([sched.DaemonLost(now_ns=0, rank=0, dead=False, reason="x")], 1),
        ([sched.DaemonReady(now_ns=0, rank=0, epoch=1, attached=True)], 1),
        (
            [
                sched.DaemonReady(now_ns=0, rank=0, epoch=1, attached=True),
                sched.DaemonReady(now_ns=0, rank=0, epoch=2, attached=True),
            ],
            0,
        ),
    ],
)
def test_only_a_dead_daemon_need_not_end_its_jobs(
    tmp_path: Path, events: list[sched.SchedEvent], num_broken: int
) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.plan(scene, msg.StepPlan(step=5, loads=(scenes.load_job(),)))
    for event in events:
        scene.sched(event)
    scene.sched(
        sched.Ticked(now_ns=scene.tick()),
        sched_do.FreeBlocks(job_id=11, block_ids=(21, 22, 23, 24)),
    )
    assert len(broken(scene)) == num_broken


def test_blocks_freed_twice_or_others_than_held(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scene.sched(
        sched.Ticked(now_ns=scene.tick()),
        sched_do.HoldBlocks(job_id=1, block_ids=(5, 6)),
        sched_do.HoldBlocks(job_id=1, block_ids=(5, 6)),
    )
    for _ in range(2):
        scene.sched(
            sched.Ticked(now_ns=scene.tick()), sched_do.FreeBlocks(job_id=1, block_ids=(5,))
        )
    assert [text for _, text in broken(scene)] == [
        "blocks of job 1 are held twice",
        "job 1 held blocks 5-6 but gives back 5",
        "blocks of job 1 are given back but not held",
    ]


def test_a_tainted_job_that_is_published(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.save(scene, tainted=True, publish=True)
    judgement = judge(scene)
    (violation,) = judgement.violations
    assert violation.rule == "nothing-tainted-published"
    assert "tainted job 12" in violation.text
    assert violation.request == scenes.REQUEST


def test_a_block_that_a_clean_job_saves_too_may_be_published(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    twins = (scenes.save_job(12), scenes.save_job(13, "other"))
    scene.to_worker(msg.StepPlan(step=6, saves=twins))
    close = work_do.ClosePuts(op=1, engine=scenes.KEY, step=6, end=(scenes.key(b"s" * 32),))
    scene.to_worker(msg.StepVerdict(step=6, tainted=(12,)), close)
    assert broken(scene) == []


def test_publishing_without_a_verdict(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    close = work_do.ClosePuts(op=1, engine=scenes.KEY, step=6, end=(scenes.key(b"s" * 32),))
    scene.to_worker(msg.StepPlan(step=6, saves=(scenes.save_job(),)), close)
    assert broken(scene) == [
        ("nothing-tainted-published", "step 6 is published without a verdict on it")
    ]


@pytest.mark.parametrize(
    ("said", "num_broken"),
    [
        ([], 1),
        ([(3, msg.StepBegun(step=4))], 1),
        ([(3, msg.StepBegun(step=5))], 0),
        ([(3, msg.StepBegun(step=8))], 0),
        ([(3, msg.StepBegun(step=8)), (4, msg.StepBegun(step=1))], 1),
    ],
)
def test_a_load_before_its_gate(
    tmp_path: Path, said: list[tuple[int, msg.StepBegun]], num_broken: int
) -> None:
    scene = scenes.Scene(tmp_path)
    for epoch, body in said:
        scene.worker(work.ModelSaid(now_ns=scene.tick(), engine=scenes.KEY, epoch=epoch, body=body))
    load = work_do.LoadLayers(
        op=10,
        engine=scenes.KEY,
        step=5,
        group=0,
        keys=(),
        block_ids=(),
        first_layer=0,
        end_layer=1,
    )
    scene.worker(work.Ticked(now_ns=scene.tick()), load)
    assert len(broken(scene)) == num_broken


def test_a_flood_of_violations_is_counted(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    for op in range(9):
        scene.worker(work.GetsClosed(now_ns=scene.tick(), op=op))
    judgement = check_rules(scene.close().logs, WHOLE, max_violations=4)
    assert len(judgement.violations) == 4
    assert judgement.num_more == 5
