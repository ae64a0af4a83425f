"""The world around the core notices a core that breaks a rule: each mutant here must be caught.

The core's own validation is off, so that it is the world's checks that are tested.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvcommon.errors import KVFerryError
from kvworker.core.attachments import Attachments
from kvworker.core.engines import Engine, Progress
from kvworker.core.jobs import Block, Job, JobBook
from kvworker.core.kernel import Kernel
from kvworker.core.loads import Loads
from kvworker.core.save_batch import SaveBatch
from kvworker.core.saves import Saves
from kvworker.core.states import BlockState
from tests.support.worker_machine import CoreMachine

Patch = pytest.MonkeyPatch


class UnvalidatedMachine(CoreMachine):
    validate = False


def gate_opens_a_step_early(patch: Patch) -> None:
    right = Engine.note_begun
    patch.setattr(Engine, "note_begun", lambda self, step: right(self, step + 1))


def gate_stays_open_for_the_next_incarnation(patch: Patch) -> None:
    patch.setattr(Progress, "reset", lambda self: None)


def writes_before_layers_are_computed(patch: Patch) -> None:
    patch.setattr(SaveBatch, "ready_layers", lambda self, job: self.num_layers)


def publishes_incomplete_objects(patch: Patch) -> None:
    patch.setattr(SaveBatch, "is_complete", lambda self, block: True)


def publishes_without_a_verdict(patch: Patch) -> None:
    right = Saves.advance

    def advance(self: Saves, batch: SaveBatch) -> None:
        batch.verdict = True
        right(self, batch)

    patch.setattr(Saves, "advance", advance)


def publishes_what_is_tainted(patch: Patch) -> None:
    right = Saves.verdict

    def verdict(self: Saves, engine: Engine, step: int, tainted: Sequence[int]) -> None:
        right(self, engine, step, ())

    patch.setattr(Saves, "verdict", verdict)


def forgets_to_revoke(patch: Patch) -> None:
    right = Saves._settle

    def settle(self: Saves, batch: SaveBatch) -> None:
        right(self, batch)
        batch.leftover.clear()

    patch.setattr(Saves, "_settle", settle)


def forgets_who_writes_a_key(patch: Patch) -> None:
    class Forgetful(dict[str, SaveBatch]):
        def __contains__(self, key: object) -> bool:
            return False

    right: Callable[..., None] = Saves.__init__

    def init(self: Saves, *parts: Any) -> None:
        right(self, *parts)
        self.writers = Forgetful()

    patch.setattr(Saves, "__init__", init)


def does_not_cancel_before_it_unmaps(patch: Patch) -> None:
    patch.setattr(Kernel, "cancel", lambda self, op: None)


def keeps_jobs_of_lost_memory(patch: Patch) -> None:
    right = Attachments._let_go

    def let_go(self: Attachments, engine: Engine, reason: str) -> None:
        saves, self._saves = self._saves, Saves(self._kernel, None, None)  # type: ignore[arg-type]
        right(self, engine, reason)
        self._saves = saves

    patch.setattr(Attachments, "_let_go", let_go)


def forgets_to_report(patch: Patch) -> None:
    right = JobBook.end
    patch.setattr(
        JobBook, "end", lambda self, job: None if job.key.job_id % 2 else right(self, job)
    )


def reports_twice(patch: Patch) -> None:
    right = JobBook.end

    def end(self: JobBook, job: Job) -> None:
        right(self, job)
        where = (job.key.engine, job.step)
        for ends in (self._reports.scheduler.get(where), self._reports.model.get(where)):
            if ends:
                ends.append(ends[-1])

    patch.setattr(JobBook, "end", end)


def ends_jobs_while_their_blocks_are_loaded(patch: Patch) -> None:
    right = Loads.give_up

    def give_up(self: Loads, batch: Any, jobs: Sequence[Job], reason: str) -> None:
        for job in jobs:
            job.cancel(reason)
        self._settle(batch)
        right(self, batch, [], reason)

    patch.setattr(Loads, "give_up", give_up)


def calls_failed_blocks_done(patch: Patch) -> None:
    right = Block.move

    def move(self: Block, to: BlockState, reason: str = "") -> None:
        failed = to is BlockState.FAILED and self.state is BlockState.OPEN
        right(self, BlockState.DONE if failed else to, reason)

    patch.setattr(Block, "move", move)


def never_turns_the_page(patch: Patch) -> None:
    patch.setattr(Loads, "_publish", lambda self, engine, page: None)


def keeps_get_references(patch: Patch) -> None:
    right = Loads._close

    def close(self: Loads, batch: Any) -> None:
        batch.held = batch.held[:-1]
        right(self, batch)

    patch.setattr(Loads, "_close", close)


MUTANTS = (
    gate_opens_a_step_early,
    gate_stays_open_for_the_next_incarnation,
    writes_before_layers_are_computed,
    publishes_incomplete_objects,
    publishes_without_a_verdict,
    publishes_what_is_tainted,
    forgets_to_revoke,
    forgets_who_writes_a_key,
    does_not_cancel_before_it_unmaps,
    keeps_jobs_of_lost_memory,
    forgets_to_report,
    reports_twice,
    ends_jobs_while_their_blocks_are_loaded,
    calls_failed_blocks_done,
    never_turns_the_page,
    keeps_get_references,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_mutant_is_caught(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    profile = settings(
        max_examples=400,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    with pytest.raises((AssertionError, KVFerryError, KeyError, ValueError)):
        run_state_machine_as_test(UnvalidatedMachine, settings=profile)
