"""Which layers call hooks, and what is waited for where."""

from hypothesis import given
from hypothesis import strategies as st

from kvsched.hooks import HookTable

NAMES = ("l0", "l1", "l2", "l3")


def watched(*hooked: str) -> HookTable:
    """A table that has seen one whole forward pass."""
    table = HookTable(NAMES)
    for name in hooked:
        table.saw(name)
    table.step_over()
    return table


def test_before_anything_is_known_everything_is_waited_for() -> None:
    table = HookTable(NAMES)
    assert table.silent
    assert [table.needed_for(name) for name in NAMES] == [4, 4, 4, 4]


def test_where_all_layers_call_each_waits_for_itself() -> None:
    table = watched(*NAMES)
    assert table.learned
    assert not table.silent
    assert [table.needed_for(name) for name in NAMES] == [1, 2, 3, 4]


def test_silent_layers_are_waited_for_at_the_first_hook() -> None:
    table = watched("l0", "l1", "l3")
    assert [table.needed_for(name) for name in ("l0", "l1", "l3")] == [3, 3, 4]
    assert [watched("l2").needed_for("l2")] == [4]


def test_an_unknown_layer_waits_for_the_silent_ones() -> None:
    assert watched("l0", "l2", "l3").needed_for("draft") == 2
    assert watched(*NAMES).needed_for("draft") == 0


def test_a_step_without_hooks_teaches_nothing() -> None:
    table = HookTable(NAMES)
    table.step_over()
    table.saw("unknown")
    table.step_over()
    assert table.silent
    assert table.needed_for("l0") == 4


def test_what_was_learnt_once_stays() -> None:
    table = watched(*NAMES)
    table.saw("l0")
    table.step_over()
    assert table.needed_for("l0") == 1


def test_distrust_stays() -> None:
    table = watched(*NAMES)
    table.distrust()
    table.saw("l0")
    table.step_over()
    assert table.silent


def test_layers_computed_in_order() -> None:
    table = HookTable(NAMES)
    assert [table.computed(name, index) for index, name in enumerate(NAMES)] == [1, 2, 3, 4]


def test_layers_computed_out_of_order() -> None:
    table = HookTable(NAMES)
    assert table.computed("l1", 0) == 0
    assert table.computed("l2", 0) == 0
    assert table.computed("l0", 0) == 3
    assert table.computed("l3", 3) == 4


def test_layers_computed_twice_and_unknown_ones_count_nothing() -> None:
    table = HookTable(NAMES)
    assert table.computed("l0", 0) == 1
    assert table.computed("l0", 1) == 0
    assert table.computed("", 1) == 0
    assert table.computed("draft", 1) == 0


def test_a_new_step_forgets_the_layers_of_the_last() -> None:
    table = HookTable(NAMES)
    assert table.computed("l1", 0) == 0
    table.step_over()
    assert table.computed("l0", 0) == 1


@given(st.permutations(NAMES))
def test_in_any_order_all_layers_come_to_all(order: list[str]) -> None:
    table = HookTable(NAMES)
    num_computed, done = 0, set()
    for name in order:
        done.add(NAMES.index(name))
        num_computed = table.computed(name, num_computed) or num_computed
        assert set(range(num_computed)) <= done
        assert num_computed not in done
    assert num_computed == len(NAMES)
