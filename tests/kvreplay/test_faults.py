"""Planted faults of the world: the story names the cause.

They are faults of the world around two right cores: these must cope, so ``verify`` finds nothing,
and the story says what happened. ``test_broken_cores`` has those of the cores themselves.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcommon import messages as msg
from kvreplay.story import tell
from kvreplay.verify import verify
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome
from tests.kvreplay.pair import Pair
from tests.support.schedplay import hashes

BLOCKS = range(1, 8)


def outcomes(kind: type, *bad: int, outcome: Outcome) -> Callable[[int, Any], Any]:
    """The store says this of some keys (by position) of one kind of command."""

    def answer(_rank: int, command: Any) -> list[Outcome] | None:
        if not isinstance(command, kind):
            return None
        keys = command.keys  # type: ignore[attr-defined]
        return [outcome if not bad or i in bad else Outcome.OK for i in range(len(keys))]

    return answer


def held_load(pair: Pair) -> None:
    """A layerwise load of six blocks is running when step 1 does."""
    pair.put("a", 6)
    pair.slow = {work_do.LoadLayers}
    pair.add("req", 100, "a")
    pair.ask("req", 100)
    pair.allocate("req", BLOCKS, 96)
    pair.schedule(1, "req", BLOCKS, 96, 4)
    pair.run(1)


def evicted(pair: Pair) -> None:
    pair.put("a", 6)
    gone = pair.key(hashes(6, "a")[2])

    def answer(_rank: int, command: Any) -> Any:
        if isinstance(command, work_do.OpenGets):
            return [Outcome.MISS if key == gone else Outcome.OK for key in command.keys]
        return None

    pair.answer = answer
    pair.serve("req", 100, "a")


def rank_lacks_its_part(pair: Pair) -> None:
    pair.put("a", 6, [0])
    pair.serve("req", 100, "a")


def late_lookup(pair: Pair) -> None:
    pair.put("a", 6)
    pair.slow = {work_do.FindKeys}
    pair.add("req", 100, "a")
    pair.ask("req", 100)
    pair.later(150)
    pair.ask("req", 100)
    pair.allocate("req", BLOCKS, 0)
    pair.release()
    pair.finish("req")


def daemon_killed(pair: Pair) -> None:
    held_load(pair)
    pair.dead = {0}
    pair.say(sched.DaemonLost, rank=0, dead=True, reason="its process ended")
    pair.failed = set(range(1, 7))
    pair.finish_step(1)
    pair.finish("req")


def layer_fails(pair: Pair) -> None:
    pair.put("a", 6)
    pair.answer = outcomes(work_do.LoadLayers, 3, outcome=Outcome.FAILED)
    pair.serve("req", 100, "a")


def lease_ends(pair: Pair) -> None:
    pair.put("a", 6)
    pair.answer = outcomes(work_do.LoadLayers, outcome=Outcome.EXPIRED)
    pair.serve("req", 100, "a")


def store_is_full(pair: Pair) -> None:
    pair.answer = outcomes(work_do.OpenPuts, outcome=Outcome.FULL)
    pair.serve("req", 100, "a")


def somebody_else_saves(pair: Pair) -> None:
    pair.answer = outcomes(work_do.OpenPuts, outcome=Outcome.EXISTS)
    pair.serve("req", 100, "a")


def write_fails(pair: Pair) -> None:
    bad = {pair.key(one) for one in hashes(2, "a")}

    def answer(_rank: int, command: Any) -> Any:
        if isinstance(command, work_do.WriteLayers):
            return [Outcome.FAILED if key in bad else Outcome.OK for key in command.keys]
        return None

    pair.answer = answer
    pair.serve("req", 100, "a")


def store_is_down(pair: Pair) -> None:
    pair.answer = outcomes(work_do.FindKeys, outcome=Outcome.DOWN)
    for number in range(3):
        pair.serve(f"early-{number}", 33, "b", step=number + 1, first_block=10)
    pair.serve("req", 100, "a", step=9)


def never_attached(pair: Pair) -> None:
    pair.serve("req", 100, "a")


def too_short_a_hit(pair: Pair) -> None:
    pair.put("a", 2)
    pair.serve("req", 100, "a")


def save_after_a_failed_load(pair: Pair) -> None:
    pair.put("a", 3)
    pair.answer = outcomes(work_do.LoadLayers, 2, outcome=Outcome.FAILED)
    pair.serve("req", 100, "a")


def model_dies_while_saving(pair: Pair) -> None:
    pair.slow = {work_do.WriteLayers}
    pair.add("req", 100, "a")
    pair.ask("req", 100)
    pair.allocate("req", BLOCKS, 0)
    pair.schedule(1, "req", BLOCKS, 0, 100)
    pair.run(1)
    lost = {"engine": "eng-1#0", "role": "model", "epoch": 9, "reason": "its process ended"}
    pair.worker_event(0, work.PeerLost, **lost)
    pair.pump()
    pair.answer = outcomes(work_do.WriteLayers, outcome=Outcome.CANCELLED)
    pair.release()


def aborted(pair: Pair) -> None:
    pair.put("a", 6)
    pair.slow = {work_do.LoadLayers}
    pair.add("req", 100, "a")
    pair.ask("req", 100)
    pair.allocate("req", BLOCKS, 96)
    pair.schedule(1, "other", (), 0, 0)
    pair.run(1)
    pair.finish("req")
    pair.schedule(2, "other", (), 0, 0)
    assert pair.tell is not None
    pair.model(0, msg.CancelJobs(step=2, job_ids=pair.tell.cancel))
    pair.pump()
    pair.answer = outcomes(work_do.LoadLayers, outcome=Outcome.CANCELLED)
    pair.release()


#: Fault, what it needs, outcome, reason, facts of the sentence.
WORLD: list[tuple[Callable[[Pair], None], dict[str, Any], str, str, list[str]]] = [
    (evicted, {}, "failed-load", "evicted", ["1 block (3)", "rank 0", "no longer had"]),
    (rank_lacks_its_part, {"ranks": 2}, "miss", "not-stored", ["block 1", "for rank 1"]),
    (late_lookup, {}, "miss", "lookup-timeout", ["before its deadline", "156.000 ms after"]),
    (daemon_killed, {}, "lost-load", "daemon-lost", ["daemon of rank 0", "its process ended"]),
    (layer_fails, {}, "failed-load", "transfer-failed", ["1 block (4)", "the transfer failed"]),
    (lease_ends, {}, "failed-load", "expired", ["6 blocks (1-6)", "lease ran out"]),
    (store_is_full, {}, "miss", "not-stored", ["could not save 6 blocks", "(store-full)"]),
    (somebody_else_saves, {}, "miss", "not-stored", ["did not save 6 blocks", "(exists)"]),
    (write_fails, {}, "miss", "not-stored", ["could not save 2 blocks", "(transfer-failed)"]),
    (store_is_down, {}, "miss", "store-down", ["the store did not answer the lookup"]),
    (never_attached, {"attached": False}, "miss", "daemon-not-attached", ["not attached"]),
    (too_short_a_hit, {"min_load_blocks": 3}, "miss", "not-worth-loading", ["2 stored"]),
    (
        save_after_a_failed_load,
        {},
        "failed-load",
        "transfer-failed",
        ["save of 3 blocks in step 1 was revoked", "load of that step had failed", "(tainted)"],
    ),
    (
        model_dies_while_saving,
        {},
        "miss",
        "not-stored",
        ["could not save 6 blocks in step 1 (engine-lost)", "the model side of eng-1#0 was lost"],
    ),
    (
        aborted,
        {"load": "async"},
        "failed-load",
        "cancelled",
        ["asynchronous", "given up", "because the request had ended"],
    ),
]


@pytest.mark.parametrize(
    ("fault", "needs", "outcome", "reason", "said"),
    WORLD,
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_story_names_the_cause_and_the_cores_obey(  # noqa: PLR0917 - named by the table
    tmp_path: Path,
    fault: Callable[[Pair], None],
    needs: dict[str, Any],
    outcome: str,
    reason: str,
    said: list[str],
) -> None:
    pair = Pair(tmp_path, **needs)
    fault(pair)
    logs = pair.close()
    told = tell(logs, "req")
    assert (told.facts.outcome, told.facts.reason) == (outcome, reason), told.sentence
    for text in said:
        assert text in told.sentence
    verdict = verify(logs)
    assert verdict.status == 0, verdict.plain()
