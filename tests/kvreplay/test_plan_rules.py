"""Faults of a scheduler side, which its daemons carry out faithfully, and of a shell that lies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcommon import messages as msg
from kvreplay.verify import Result, verify
from kvsched.core import commands as do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from tests.kvreplay.pair import Pair
from tests.kvreplay.test_faults import BLOCKS, held_load, save_after_a_failed_load
from tests.support.schedplay import hashes


def in_plans(pair: Pair, make: Callable[[msg.StepPlan], msg.StepPlan]) -> None:
    """Every plan is another one; blocks are held as they were."""

    def spoil(_event: msgspec.Struct, commands: list[Any]) -> list[Any]:
        return [
            msgspec.structs.replace(one, body=make(one.body))
            if isinstance(getattr(one, "body", None), msg.StepPlan)
            else one
            for one in commands
        ]

    pair.spoil_sched = spoil


def loads_into_others_blocks(pair: Pair) -> None:
    pair.put("a", 6)

    def make(plan: msg.StepPlan) -> msg.StepPlan:
        loads = [
            msgspec.structs.replace(job, block_ids=(*job.block_ids[1:], job.block_ids[0]))
            for job in plan.loads
        ]
        return msgspec.structs.replace(plan, loads=tuple(loads))

    in_plans(pair, make)
    pair.serve("req", 100, "a")


def saves_from_others_blocks(pair: Pair) -> None:
    def make(plan: msg.StepPlan) -> msg.StepPlan:
        saves = [
            msgspec.structs.replace(job, block_ids=(*job.block_ids[1:], job.block_ids[0]))
            for job in plan.saves
        ]
        return msgspec.structs.replace(plan, saves=tuple(saves))

    in_plans(pair, make)
    pair.serve("req", 100, "a")


def loads_what_was_not_found(pair: Pair) -> None:
    """The store has four blocks; five are loaded."""
    pair.put("a", 4)

    def make(plan: msg.StepPlan) -> msg.StepPlan:
        loads = [
            msgspec.structs.replace(
                job, block_ids=tuple(BLOCKS)[:5], block_hashes=hashes(6, "a")[:5]
            )
            for job in plan.loads
        ]
        return msgspec.structs.replace(plan, loads=tuple(loads))

    in_plans(pair, make)
    pair.serve("req", 100, "a")


def verdict_forgets(pair: Pair) -> None:
    """A load failed, and what was computed from it is published."""

    def spoil(_event: msgspec.Struct, commands: list[Any]) -> list[Any]:
        return [
            msgspec.structs.replace(one, body=msgspec.structs.replace(one.body, tainted=()))
            if isinstance(getattr(one, "body", None), msg.StepVerdict)
            else one
            for one in commands
        ]

    pair.spoil_sched = spoil
    save_after_a_failed_load(pair)


def two_loads_into_one_block(pair: Pair) -> None:
    """vLLM gives blocks to a second request while the first one's load runs."""
    held_load(pair)
    pair.put("b", 6)
    pair.add("other", 100, "b")
    pair.ask("other", 100)
    pair.allocate("other", BLOCKS, 96)
    pair.schedule(2, "other", BLOCKS, 96, 4)


def called_dead_and_is_not(pair: Pair) -> None:
    """The shell says that the daemon's process has ended; its load goes on."""
    held_load(pair)
    pair.say(sched.DaemonLost, rank=0, dead=True, reason="so it is said")
    pair.pump()
    pair.release()


CORES = [
    (loads_into_others_blocks, "plans-as-given", "is to load into block 2"),
    (saves_from_others_blocks, "plans-as-given", "is to save from block 2"),
    (loads_what_was_not_found, "loads-as-found", "to load 1 blocks that lookup 1 has not found"),
    (verdict_forgets, "plans-as-given", "is not tainted"),
]
OTHERS = [
    (two_loads_into_one_block, "loads-as-found", "into block 1, which job 1 still holds"),
    (called_dead_and_is_not, "released-left-alone", "ends after its blocks were given back"),
]


@pytest.mark.parametrize(("fault", "rule", "text"), [*CORES, *OTHERS])
def test_what_a_scheduler_side_does_wrong_is_found(
    tmp_path: Path, fault: Callable[[Pair], None], rule: str, text: str
) -> None:
    pair = Pair(tmp_path)
    fault(pair)
    verdict = verify(pair.close())
    assert verdict.status == 1
    found = [one for one in verdict.judgement.violations if one.rule == rule]
    assert any(text in one.text for one in found), verdict.plain()["violations"]
    different = any(replay.result is Result.DIFFERENT for replay in verdict.replays)
    assert different == ((fault, rule, text) in CORES), "the right core would do the same"


def test_a_daemon_that_is_dead_ends_nothing_any_more(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    held_load(pair)
    pair.dead.add(0)
    pair.say(sched.DaemonLost, rank=0, dead=True, reason="killed")
    pair.pump()
    assert verify(pair.close()).judgement.violations == []


def test_what_was_preempted_and_comes_back_elsewhere_is_no_fault(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.add("req", 100, "a")
    pair.ask("req", 100)
    pair.allocate("req", BLOCKS, 0)
    pair.schedule(1, "req", BLOCKS, 0, 50)
    pair.run(1)
    pair.finish_step(1)
    pair.say(sched.StepScheduled, step=2, preempted=("req",))
    pair.pump()
    elsewhere = [block + 20 for block in BLOCKS]
    pair.ask("req", 100)
    pair.allocate("req", elsewhere, 0)
    pair.schedule(3, "req", elsewhere, 0, 100)
    pair.run(3)
    pair.finish_step(3)
    logs = pair.close()
    assert verify(logs).status == 0
    plans = [
        command.body
        for log in logs.logs
        for entry in log
        for command in entry.commands
        if isinstance(command, do.SendToDaemon) and isinstance(command.body, msg.StepPlan)
    ]
    assert [min(job.block_ids) >= 20 for plan in plans for job in plan.saves] == [False, True]


def test_logs_of_which_the_beginning_is_missing_accuse_nobody(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    loads_into_others_blocks(pair)
    logs = pair.close()
    for log in logs.logs:
        log.parts[0].header.info["first_seq"] = "7"
    names = {one.rule for one in verify(logs).judgement.violations}
    assert "plans-as-given" not in names


def test_the_daemons_copies_are_what_is_judged(tmp_path: Path) -> None:
    """A load that is planned and given up before its daemon begins it moves nothing."""
    pair = Pair(tmp_path)
    pair.slow = {work_do.OpenGets}
    pair.put("a", 6)
    pair.add("req", 100, "a")
    pair.ask("req", 100)
    pair.allocate("req", BLOCKS, 96)
    pair.schedule(1, "req", BLOCKS, 96, 4)
    pair.say(sched.DaemonLost, rank=0, dead=True, reason="killed")
    pair.pump()
    found = verify(pair.close()).judgement.violations
    assert [one for one in found if one.rule == "released-left-alone"] == []
