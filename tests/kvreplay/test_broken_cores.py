"""Planted faults of a core: ``verify`` names the rule that was broken, and where the right core
answers something else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcommon import messages as msg
from kvcommon.errors import LocalProtocolError
from kvreplay.verify import Result, verify
from kvsched.core import commands as sched_do
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome
from tests.kvreplay.pair import Pair, Spoil
from tests.kvreplay.test_faults import BLOCKS, held_load, save_after_a_failed_load
from tests.support.schedplay import hashes


def change(kind: type, make: Callable[[Any], Any]) -> Spoil:
    """The first command of a kind is another one; a list: several, or none."""
    left = [1]

    def spoil(_event: msgspec.Struct, commands: list[Any]) -> list[Any]:
        out: list[Any] = []
        for command in commands:
            body = getattr(command, "body", command)
            if left and (isinstance(body, kind) or isinstance(command, kind)):
                made = make(command)
                if made is not command:
                    left.clear()
                out += made if isinstance(made, list) else [made]
            else:
                out.append(command)
        return out

    return spoil


def other(**fields: Any) -> Callable[[Any], Any]:
    return lambda command: msgspec.structs.replace(command, **fields)


def end_all(command: Any) -> Any:
    """Publish what is to be discarded."""
    return msgspec.structs.replace(command, end=command.end + command.revoke, revoke=())


def hit_everything(command: Any) -> Any:
    result = command.body
    hits = (msg.GroupHit(group=0, num_blocks=6),)
    return msgspec.structs.replace(
        command, body=msgspec.structs.replace(result, hits=hits, reason="")
    )


def wrong_block(pair: Pair) -> None:
    pair.put("a", 6)
    pair.spoil_worker = change(work_do.LoadLayers, other(block_ids=(1, 2, 3, 4, 5, 9)))
    pair.serve("req", 100, "a")


def double_end(pair: Pair) -> None:
    pair.put("a", 6)
    pair.spoil_worker = change(
        work_do.SendToScheduler,
        lambda command: [command, command] if isinstance(command.body, msg.JobsEnded) else command,
    )
    pair.serve("req", 100, "a")


def tainted_published(pair: Pair) -> None:
    pair.slow = {work_do.ClosePuts}
    pair.spoil_worker = change(
        work_do.ClosePuts, lambda command: end_all(command) if command.revoke else command
    )
    save_after_a_failed_load(pair)


def freed_too_early(pair: Pair) -> None:
    early = sched_do.FreeBlocks(job_id=1, block_ids=(1, 2, 3, 4, 5, 6))
    pair.spoil_sched = change(sched_do.TellModel, lambda command: [command, early])
    held_load(pair)


def loaded_before_the_gate(pair: Pair) -> None:
    pair.put("a", 6)
    load: list[Any] = []

    def spoil(event: msgspec.Struct, commands: list[Any]) -> list[Any]:
        if not isinstance(event, work.GetsOpened) or load:
            return commands
        keys = tuple(pair.key(one) for one in hashes(6, "a"))
        load.append(
            work_do.LoadLayers(
                op=900,
                engine="eng-1#0",
                step=1,
                group=0,
                keys=keys,
                block_ids=(1, 2, 3, 4, 5, 6),
                first_layer=0,
                end_layer=3,
            )
        )
        return [*commands, *load]

    pair.slow = {work_do.LoadLayers}
    pair.spoil_worker = spoil
    pair.add("req", 100, "a")
    pair.ask("req", 100)
    pair.allocate("req", BLOCKS, 96)
    pair.schedule(1, "req", BLOCKS, 96, 4)


def hit_without_every_rank(pair: Pair) -> None:
    pair.put("a", 6, [0])
    pair.put("a", 2, [1])
    pair.spoil_worker = change(msg.LookupResult, hit_everything)
    pair.serve("req", 100, "a")


def ended_while_it_moves(pair: Pair) -> None:
    end = msg.JobEnd(job_id=1, outcome=msg.JobOutcome.CANCELLED, failed_blocks=(1, 2, 3, 4, 5, 6))
    told = work_do.SendToScheduler(engine="eng-1#0", body=msg.JobsEnded(ends=(end,)))
    pair.spoil_worker = change(work_do.LoadLayers, lambda command: [command, told])
    held_load(pair)


def given_back_otherwise(pair: Pair) -> None:
    pair.put("a", 6)
    pair.spoil_sched = change(sched_do.FreeBlocks, other(block_ids=(1, 2)))
    pair.serve("req", 100, "a")


def published_early(pair: Pair, num_layers: int) -> None:
    """The objects are published when so many layers of the step are computed."""
    pair.add("req", 100, "a")
    pair.ask("req", 100)
    pair.allocate("req", BLOCKS, 0)
    pair.schedule(1, "req", BLOCKS, 0, 100)
    keys = tuple(pair.key(one) for one in hashes(6, "a"))
    early = work_do.ClosePuts(op=901, engine="eng-1#0", step=1, end=keys)
    moment = msg.LayersComputed(step=1, num_layers=num_layers)

    def spoil(event: msgspec.Struct, commands: list[Any]) -> list[Any]:
        now = isinstance(event, work.ModelSaid) and event.body == moment
        return [*commands, early] if now else commands

    pair.slow = {work_do.ClosePuts}
    pair.spoil_worker = spoil
    pair.run(1)


def published_without_verdict(pair: Pair) -> None:
    published_early(pair, 3)


def published_without_a_layer(pair: Pair) -> None:
    published_early(pair, 2)


CORES: list[tuple[Callable[[Pair], None], dict[str, Any], str, str]] = [
    (wrong_block, {}, "blocks-as-planned", "loads into block 9"),
    (double_end, {}, "job-ends-once", "job 1 ended twice on eng-1#0"),
    (tainted_published, {}, "nothing-tainted-published", "is published"),
    (freed_too_early, {}, "free-after-ends", "before rank 0 has ended it"),
    (loaded_before_the_gate, {}, "load-after-gate", "newest begun step is 0"),
    (hit_without_every_rank, {"ranks": 2}, "hits-complete", "found for 1 of 2 ranks"),
    (published_without_a_layer, {}, "published-complete", "of 3 layers written"),
    (ended_while_it_moves, {}, "blocks-as-planned", "still moves its blocks"),
    (given_back_otherwise, {}, "free-after-ends", "held blocks 1-6 but gives back 1-2"),
    (published_without_verdict, {}, "nothing-tainted-published", "without a verdict"),
]


@pytest.mark.parametrize(
    ("fault", "needs", "rule", "text"), CORES, ids=lambda one: getattr(one, "__name__", "")
)
def test_a_broken_core_is_found_out(
    tmp_path: Path, fault: Callable[[Pair], None], needs: dict[str, Any], rule: str, text: str
) -> None:
    pair = Pair(tmp_path, **needs)
    fault(pair)
    logs = pair.close()
    verdict = verify(logs)
    assert verdict.status == 1
    found = [one for one in verdict.judgement.violations if one.rule == rule]
    assert any(text in one.text for one in found), verdict.plain()["violations"]
    # The right core answers something else, and says where.
    assert any(replay.result is Result.DIFFERENT for replay in verdict.replays)
    assert {one.request for one in found} <= {"req", ""}


def test_a_shell_that_answers_twice_is_found_out(tmp_path: Path) -> None:
    """The core refuses the second answer: the fault is recorded, and comes again in the replay."""
    pair = Pair(tmp_path)
    pair.put("a", 6)
    pair.add("req", 100, "a")
    twice = {"op": 2, "outcomes": (Outcome.OK,) * 6}
    pair.worker_event(0, work.KeysFound, **twice)
    with pytest.raises(LocalProtocolError, match="operation 2 is not open"):
        pair.pump()
    verdict = verify(pair.close())
    assert [one.result for one in verdict.replays] == [Result.SAME] * 2
    assert [(one.rule, one.text) for one in verdict.judgement.violations] == [
        ("op-ends-once", "op 2 ended twice")
    ]
