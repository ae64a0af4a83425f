"""What a save batch knows of itself."""

from kvworker.core.engines import Engine, Progress
from kvworker.core.jobs import Block, Job, JobKey
from kvworker.core.save_batch import MEANING, SaveBatch
from kvworker.core.states import BlockState
from kvworker.outcome import Outcome
from tests.support.playbook import NUM_LAYERS, OBJECT_BYTES, group_layout


def batch_of(*blocks: Block, computed: bool = False) -> SaveBatch:
    engine = Engine(key="e#0", progress=Progress(memory=4))
    job = Job(
        key=JobKey("e#0", 1, 1),
        engine=engine,
        kind="save",
        request_id="r",
        step=2,
        group=0,
        blocks=blocks,
        incarnation=0,
        computed=computed,
    )
    return SaveBatch(engine, 0, 2, group_layout(), [job])


def test_complete_means_every_layer_and_every_byte() -> None:
    batch = batch_of()
    assert batch.is_complete(Block(1, "k", num_layers=NUM_LAYERS, num_bytes=OBJECT_BYTES))
    assert not batch.is_complete(Block(1, "k", num_layers=NUM_LAYERS, num_bytes=OBJECT_BYTES - 1))
    assert not batch.is_complete(Block(1, "k", num_layers=NUM_LAYERS - 1, num_bytes=OBJECT_BYTES))


def test_blocks_can_complete_once_the_step_has_begun_and_all_layers_are_there() -> None:
    batch = batch_of()
    (job,) = batch.jobs
    batch.ready = NUM_LAYERS
    assert not batch.can_complete(job)
    batch.engine.progress.begun = 2
    assert batch.can_complete(job)
    batch.ready = NUM_LAYERS - 1
    assert not batch.can_complete(job)
    job.computed = True
    assert batch.can_complete(job)


def test_parts_are_the_blocks_in_a_state_in_order() -> None:
    blocks = Block(1, "a"), Block(2, "b", state=BlockState.OPEN), Block(3, "c")
    parts = list(batch_of(*blocks).parts(BlockState.WAITING))
    assert [part.block.block_id for part in parts] == [1, 3]


def test_every_outcome_but_ok_has_a_meaning_and_a_reason() -> None:
    assert set(MEANING) == set(Outcome) - {Outcome.OK}
    assert all(reason for _, reason in MEANING.values())
