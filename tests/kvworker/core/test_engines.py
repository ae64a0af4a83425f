"""The records of ranks."""

from kvworker.core.config import CoreConfig
from kvworker.core.engines import Engine, Engines, Progress
from kvworker.core.states import MapState
from tests.support.playbook import attach, group_layout


def engines(max_engines: int = 64) -> Engines:
    return Engines(CoreConfig(device="cpu:0", store="memory", max_engines=max_engines))


def test_a_rank_is_met_once() -> None:
    table = engines()
    assert table.get("a#0") is None
    engine = table.meet("a#0")
    assert table.meet("a#0") is engine is table.get("a#0")
    assert [each.key for each in table] == ["a#0"]


def test_idle_ranks_are_forgotten_beyond_the_bound_the_oldest_first() -> None:
    table = engines(max_engines=2)
    table.meet("a#0").scheduler_epoch = 1
    table.meet("b#0")
    table.meet("c#0")
    assert [each.key for each in table] == ["a#0", "c#0"]


def test_a_rank_with_anything_to_lose_is_kept() -> None:
    table = engines(max_engines=1)
    table.meet("a#0").num_batches = 1
    table.meet("b#0").reset_prefixes = ("x",)
    table.meet("c#0").move(MapState.MAPPING)
    table.meet("d#0").waiting = attach()
    table.meet("e#0")
    assert [each.key for each in table] == ["a#0", "b#0", "c#0", "d#0", "e#0"]


def test_layers_computed_never_go_back_and_old_steps_are_forgotten() -> None:
    progress = Progress(memory=2)
    progress.note_computed(1, 5)
    progress.note_computed(1, 3)
    assert progress.computed == {1: 5}
    progress.note_computed(2, 1)
    progress.note_computed(3, 1)
    assert progress.computed == {2: 1, 3: 1}
    progress.begun = 3
    progress.reset()
    assert (progress.begun, progress.computed) == (0, {})


def test_ready_layers_are_clamped_to_the_group() -> None:
    engine = Engine(key="a#0", progress=Progress(memory=4), attach=attach())
    engine.progress.note_computed(1, 99)
    assert engine.ready_layers(1, group_layout()) == 3
    assert engine.ready_layers(2, group_layout()) == 0


def test_groups_are_found_by_their_number() -> None:
    layouts = (group_layout(3), group_layout(7, 2))
    engine = Engine(key="a#0", progress=Progress(memory=4))
    assert engine.group(3) is None
    engine.attach = attach(groups=layouts)
    assert engine.group(7) == layouts[1]
    assert engine.group(0) is None
