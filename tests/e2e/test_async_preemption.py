"""Preemption and lost loads under vLLM's async scheduling.

Too few blocks: a request is preempted while its blocks are being saved and another request's load
is in flight. Whatever then fails, no step may compute on wrong bytes, every stored object must hold
what its hash says, and all blocks must be free at the end.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcommon.messages import (
    JobOutcome,
    JobsEnded,
    LoadJob,
    Lookup,
    LookupGroup,
    LookupResult,
    PlanAck,
    StepBegun,
    StepPlan,
)
from kvsched.core.commands import ModelLoad
from kvsched.metadata import read_step_metadata
from tests.e2e.asyncstack import TOKEN, Stack, stack, store
from tests.support.client import Client
from tests.support.daemonproc import DaemonProcess
from tests.support.engine import attach
from tests.support.fakemodel import NUM_BLOCKS, FakeModel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

#: The memory store copies from its own memory; without that, as from another node.
REMOTE = {"call": "local", "what": "fail"}
#: The first save of the preempting requests takes its time (``store`` opens the one before).
SLOW_SAVE = {"call": "put_start", "what": "delay", "seconds": 3, "after": 1, "times": 1}
#: So does the first layer of the load.
SLOW_LOAD = {"call": "get_ranges", "what": "delay", "seconds": 1, "times": 1}
#: Requests of one block each.
SHORT = ("a", "b", "c")


def stored(running: DaemonProcess, hashes: list[bytes]) -> dict[bytes, bytes]:
    """Read the objects of these hashes as another engine does; those that are not stored lack."""
    found: dict[bytes, bytes] = {}
    model = FakeModel()
    with (
        Client(running.endpoint, "model", engine="audit", epoch=7) as control,
        Client(running.endpoint, "data", engine="audit", epoch=7) as data,
        Client(running.endpoint, "scheduler", engine="audit") as scheduler,
    ):
        attach(control, scheduler, model)
        for number, name in enumerate(hashes, 1):
            groups = (LookupGroup(group=0, block_hashes=(name,)),)
            scheduler.say(Lookup(lookup_id=number, request_id="audit", groups=groups))
            if not scheduler.hear(LookupResult).hits[0].num_blocks:
                continue
            job = LoadJob(
                job_id=number,
                request_id="audit",
                group=0,
                block_ids=(1,),
                block_hashes=(name,),
                layerwise=False,
            )
            scheduler.say(StepPlan(step=number, loads=(job,)))
            scheduler.hear(PlanAck)
            data.say(StepBegun(step=number))
            (end,) = scheduler.hear(JobsEnded).ends
            assert end.outcome is JobOutcome.DONE, end
            found[name] = model.block(1)
    model.close()
    return found


def differing(found: Mapping[bytes, bytes], right: Mapping[bytes, bytes]) -> list[bytes]:
    """Hashes whose object holds something else than it must."""
    return [name for name, held in found.items() if held != right[name]]


def preempted_while_loading(it: Stack) -> tuple[ModelLoad, list[Any]]:
    """Plan four steps; in the last one "saving" is preempted. Returns the load, and two steps.

    15 blocks: three short requests have 1 each, "saving" 6, the load of "loading" 5. In the third
    step the short ones need another block each, and there is one. (vLLM preempts nobody who is part
    of a step that still runs, hence the fourth: the second one gets the block of "saving" that is
    not full, and those that are full are being saved, so there is none for the third one.) The
    first two steps have run, and the load has not been reported.
    """
    for index, name in enumerate(SHORT):
        it.add(name, 15, 30, first=1000 * (index + 1))
    it.add("saving", 95, 20, first=4000)
    first = it.schedule()
    assert set(first.num_scheduled_tokens) == {*SHORT, "saving"}
    it.add("loading", 81, 3)
    second = it.schedule()
    (load,) = read_step_metadata(second.kv_connector_metadata).loads
    assert (load.request_id, len(load.block_ids), it.free) == ("loading", 5, 1)
    it.finish(first, it.run(first))
    third = it.schedule()
    it.until(it.acknowledged)
    it.daemon.status()
    assert all(not any(it.model.block(block)) for block in load.block_ids), "before its gate"
    it.finish(second, it.run(second, tell_end=False))
    held = set(it.tables["saving"][:5])
    assert set(it.blocks_being_saved()) == held
    fourth = it.schedule()
    assert it.requests["saving"].num_preemptions == 1
    assert it.waiting, "the load is in flight"
    # Its blocks are nobody's yet: the daemon still reads them.
    assert not {*new_blocks(third), *new_blocks(fourth)} & held
    assert it.requests["c"].num_preemptions == 1
    return load, [third, fourth]


def new_blocks(output: Any) -> list[int]:
    """Blocks that a step gives to requests."""
    blocks = [block for new in output.scheduled_new_reqs for block in new.block_ids[0]]
    for more in output.scheduled_cached_reqs.new_block_ids:
        blocks += more[0] if more else []
    return blocks


def check_ends(it: Stack, free: int) -> None:
    """All is over, and right."""
    for name, count in (*((name, 30) for name in SHORT), ("saving", 20), ("loading", 3)):
        request = it.requests[name]
        assert request.is_finished()
        assert list(request.output_token_ids) == [TOKEN] * count
    assert it.wrong == []
    assert it.free == free
    assert not it.pending
    assert it.connector.scheduler._core.num_held_blocks == 0


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([REMOTE, SLOW_LOAD], id="nothing fails"),
        pytest.param(
            [{"call": "get_start", "what": "fail", "outcome": "miss", "times": 1}],
            id="the objects are gone",
        ),
        pytest.param(
            [
                REMOTE,
                SLOW_LOAD,
                {
                    "call": "get_ranges",
                    "what": "truncate",
                    "outcome": "failed",
                    "after": 1,
                    "times": 1,
                },
            ],
            id="half of the bytes arrive",
        ),
    ],
)
def test_a_preempted_request_that_is_being_saved_beside_a_load(
    model: Path, tmp_path: Path, faults: list[dict[str, Any]]
) -> None:
    with stack(model, tmp_path, SLOW_SAVE, *faults, max_num_batched_tokens=256) as it:
        free = it.free
        store(it)
        _, flying = preempted_while_loading(it)
        for output in flying:
            it.finish(output, it.run(output))
        it.drain()
        check_ends(it, free)
        counters = it.connector.scheduler.counters
        assert counters["preemptions"] >= 1
        assert counters.get("requests_barred", 0) == (faults != [REMOTE, SLOW_LOAD])
        right = it.expected()
        found = stored(it.daemon, list(right))
        assert differing(found, right) == []
        # The first prompt, and what the preempted one had saved when it lost its blocks.
        saved = [bytes(name) for name in it.requests["saving"].block_hashes[:5]]
        assert set(saved) <= set(found)
        assert len(found) >= 5 + 5
        # The control: one wrong byte is seen.
        wrong = {**found, saved[0]: found[saved[0]][:-1] + b"?"}
        assert differing(wrong, right) == saved[:1]


def test_the_daemon_is_killed_in_the_middle_of_a_load(model: Path, tmp_path: Path) -> None:
    hang = {"call": "get_ranges", "what": "hang", "seconds": 60, "after": 1}
    with stack(model, tmp_path, SLOW_SAVE, REMOTE, hang, max_num_batched_tokens=256) as it:
        free = it.free
        store(it)
        load, (third, fourth) = preempted_while_loading(it)
        # The first layer is there, the others never come.
        it.until(lambda: any(it.model.block(load.block_ids[0])))
        it.finish(third, it.run(third, tell_end=False))
        it.daemon.process.kill()
        it.daemon.process.wait()
        it.finish(fourth, it.run(fourth, give_up=True))
        it.drain()
        check_ends(it, free)
        counters = it.connector.scheduler.counters
        assert (counters["daemons_lost"], counters["requests_barred"]) == (1, 1)
        for left in (it.daemon.socket_path, it.daemon.descriptor_path):
            left.unlink(missing_ok=True)
    assert NUM_BLOCKS == 16, "the numbers above are made for it"
