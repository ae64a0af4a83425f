"""Tests of the tests: a core that breaks a rule on purpose is caught, and which rule is named."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvcommon.messages import StepVerdict
from kvsched.core.commands import FreeBlocks, HoldBlocks, SchedCommand, SendToDaemon
from kvsched.core.core import SchedCore
from kvsched.core.events import SchedEvent
from kvworker.core.commands import LoadLayers
from kvworker.core.core import CoreConfig as WorkerConfig
from kvworker.core.core import WorkerCore
from kvworker.core.jobs import Job
from kvworker.core.lookups import Lookups
from kvworker.core.save_batch import SaveBatch
from kvworker.outcome import Outcome
from tests.pair.machine import PairMachine
from tests.pair.world import World

_SETTINGS = settings(
    max_examples=400,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


class FreesEarly(SchedCore):
    """Rule 1: gives a job's blocks back as soon as the step's output is there."""

    def handle(self, event: SchedEvent) -> list[SchedCommand]:
        commands = super().handle(event)
        held = [c for c in commands if isinstance(c, HoldBlocks)]
        early = [FreeBlocks(job_id=c.job_id, block_ids=c.block_ids) for c in held]
        kept = [c for c in commands if not isinstance(c, FreeBlocks)]
        return [*kept, *early]


class TaintsNothing(SchedCore):
    """Rule 3: lets every save be published."""

    def handle(self, event: SchedEvent) -> list[SchedCommand]:
        return [
            SendToDaemon(rank=c.rank, body=StepVerdict(step=c.body.step))
            if isinstance(c, SendToDaemon) and isinstance(c.body, StepVerdict)
            else c
            for c in super().handle(event)
        ]


class ForgetsEnds(SchedCore):
    """Rule 2: never gives back the blocks of every third job."""

    def handle(self, event: SchedEvent) -> list[SchedCommand]:
        return [c for c in super().handle(event) if not _is_odd_free(c)]


def _is_odd_free(command: SchedCommand) -> bool:
    return isinstance(command, FreeBlocks) and command.job_id % 3 == 0


class EndsTwice(WorkerCore):
    """Rule 2: reports the end of a load twice."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        book = self._parts.book
        end_job = book.end

        def twice(job: Job) -> None:
            end_job(job)
            where = (job.key.engine, job.step)
            end = book.ended[job.key].end
            book._reports.scheduler.setdefault(where, []).append(end)

        book.end = twice  # type: ignore[method-assign]


class OneRankIsEnough(WorkerCore):
    """Rule 8: a hit is what the first rank has."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        found = Lookups._found

        def first_rank(this: Any, key: Any, lookup: Any, num_ranks: int, event: Any) -> None:
            outcomes: Sequence[Outcome] = event.outcomes
            mine = [outcomes[i - i % num_ranks] for i in range(len(outcomes))]
            event = msgspec.structs.replace(event, outcomes=tuple(mine))
            found(self._parts.lookups, this, key, lookup, num_ranks, event)

        self._parts.lookups._found = first_rank  # type: ignore[method-assign,assignment]


class PublishesEarly(WorkerCore):
    """Rule 3: does not wait for the verdict."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        advance = self._parts.saves.advance

        def hasty(batch: SaveBatch) -> None:
            if batch.engine.progress.begun >= batch.step and batch.ready == batch.num_layers:
                batch.verdict = True
            advance(batch)

        self._parts.saves.advance = hasty  # type: ignore[method-assign]


def _machine(sched: type[SchedCore], worker: type[WorkerCore]) -> type[PairMachine]:
    class Mutant(PairMachine):
        sched_type = sched
        worker_type = worker

    return Mutant


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sched", "worker", "said"),
    [
        pytest.param(FreesEarly, WorkerCore, "rule [12]|a wrong token", id="1-frees-early"),
        pytest.param(ForgetsEnds, WorkerCore, "rule 2|hung", id="2-forgets-an-end"),
        pytest.param(SchedCore, EndsTwice, "rule 2", id="2-ends-twice"),
        pytest.param(SchedCore, OneRankIsEnough, "rule 8", id="8-one-rank-is-enough"),
    ],
)
def test_a_planted_violation_is_caught(
    sched: type[SchedCore], worker: type[WorkerCore], said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        run_state_machine_as_test(_machine(sched, worker), settings=_SETTINGS)


def _a_load_fails_while_its_request_saves(
    sched: type[SchedCore], worker: type[WorkerCore] = WorkerCore
) -> None:
    world = World(load="layerwise", sched=sched, worker=worker)
    world.store.seed("A", 4)
    for _ in range(5):
        world.tick(300)
        world.deliver_all()
        world.work_all()
    world.engine.add("A", 32, 1)
    world.turn()
    world.deliver_all()
    world.work_all()
    world.deliver_all()
    world.engine.schedule()
    world.engine.run(wait=True)
    world.deliver_all()
    daemon = world.daemons[0]
    for _ in range(12):
        for op in daemon.executor.heads():
            is_load = isinstance(op.command, LoadLayers)
            daemon.executor.work(op, Outcome.FAILED if is_load else Outcome.OK)
        world.turn()
        world.deliver_all()
    world.settle()


def test_a_failed_load_taints_what_is_saved_behind_it() -> None:
    _a_load_fails_while_its_request_saves(SchedCore)
    with pytest.raises(AssertionError, match="rule 3"):
        _a_load_fails_while_its_request_saves(TaintsNothing)


def test_what_a_failed_load_spoils_is_not_published_before_the_verdict() -> None:
    """A directed story: random ones reach it too seldom to be relied on."""
    with pytest.raises(AssertionError, match="rule 3"):
        _a_load_fails_while_its_request_saves(SchedCore, PublishesEarly)
