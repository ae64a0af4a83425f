"""What a load batch knows of itself."""

from kvworker.core.engines import Engine, Progress
from kvworker.core.jobs import Block
from kvworker.core.load_batch import MEANING, LoadBatch, PageTurn
from kvworker.core.states import BlockState, MapState
from kvworker.outcome import Outcome
from tests.support.playbook import group_layout


def batch_with(page: PageTurn | None) -> LoadBatch:
    engine = Engine(key="e#0", progress=Progress(memory=4), incarnation=3)
    return LoadBatch(engine, 3, 2, group_layout(), [], page)


def test_a_lost_block_is_told_to_the_page() -> None:
    page = PageTurn(step=2, num_layers=3)
    block = Block(1, "k")
    batch_with(page).lose(block, BlockState.FAILED, "why")
    assert page.failed
    assert (block.state, block.reason) == (BlockState.FAILED, "why")


def test_an_asynchronous_batch_has_no_page() -> None:
    batch_with(None).lose(Block(1, "k"), BlockState.FAILED, "why")
    assert "asynchronous" in batch_with(None).name
    assert "layerwise" in batch_with(PageTurn(step=2, num_layers=3)).name


def test_a_batch_is_current_while_its_memory_is_mapped() -> None:
    for state in MapState:
        batch = batch_with(None)
        batch.engine.state = state
        assert batch.current == (state is MapState.MAPPED)
        batch.engine.incarnation += 1
        assert not batch.current


def test_every_outcome_but_ok_has_a_meaning_and_a_reason() -> None:
    assert set(MEANING) == set(Outcome) - {Outcome.OK}
    assert all(reason for _, reason in MEANING.values())
    assert MEANING[Outcome.MISS][1] == "evicted", "the plan came from a hit"
