import pytest

from kvworker.core.commands import OpenPuts
from kvworker.core.events import PutsOpened
from kvworker.outcome import Outcome
from tests.kvworker.devices.layouts import LAYOUTS, NUM_LAYERS, two_planes
from tests.kvworker.transfer.rig import ENGINE, OK, StagedDevice, rig_with


def test_opening_says_what_the_store_says() -> None:
    with rig_with(two_planes()) as (rig, _, _):
        assert rig.open_puts(["a", "b"]).outcomes == (OK, OK)
        assert rig.open_puts(["a", "c"]).outcomes == (Outcome.EXISTS, OK)
        assert rig.open_puts([]).outcomes == ()


def test_bytes_written_are_counted_per_key() -> None:
    with rig_with(two_planes()) as (rig, store, _):
        rig.open_puts(["a", "b"])
        store.bad_keys.add("b")
        written = rig.write(["a", "b"], [1, 2], 1, 3)
        assert written.outcomes == (OK, Outcome.FAILED)
        assert written.num_bytes == (2 * 136, 0)
        assert 0 < written.started_ns <= written.now_ns


def test_layers_of_all_keys_go_in_one_store_call() -> None:
    with rig_with(two_planes()) as (rig, store, _):
        rig.open_puts(["a", "b", "c"])
        store.calls.clear()
        rig.write(["a", "b", "c"], [1, 2, 3])
        assert store.calls == ["put_ranges"]


def test_closing_calls_the_store_only_where_there_is_something_to_close() -> None:
    with rig_with(two_planes()) as (rig, store, _):
        rig.open_puts(["a", "b"])
        rig.write(["a", "b"], [1, 2])
        store.calls.clear()
        closed = rig.close_puts(end=["a"])
        assert (closed.ended, closed.revoked) == ((OK,), ())
        closed = rig.close_puts(revoke=["b"])
        assert (closed.ended, closed.revoked) == ((), (OK,))
        rig.close_puts()
        assert store.calls == ["put_end", "put_revoke"]
        assert store.find(["a", "b"]) == [OK, Outcome.MISS]


def test_nothing_is_readable_before_it_is_closed() -> None:
    with rig_with(two_planes()) as (rig, store, _):
        rig.open_puts(["a"])
        rig.write(["a"], [1])
        assert store.find(["a"]) == [Outcome.MISS]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("staging_bytes", [1 << 20, 1000, 290])
def test_a_device_without_direct_access_saves_the_same_objects(
    name: str, staging_bytes: int
) -> None:
    keys, blocks = ["a", "b", "c"], [5, 1, 3]
    device = StagedDevice("cpu:0")
    with rig_with(LAYOUTS[name](), device, staging_bytes=staging_bytes) as (rig, _, model):
        rig.open_puts(keys)
        written = rig.write(keys, blocks)
        size = model.cache.layout.groups[0].object_bytes
        assert written.num_bytes == (size,) * 3
        rig.close_puts(end=keys)
        want = [model.cache.block(block) for block in blocks]
        model.cache.fill(2)
        rig.open_gets(keys)
        assert rig.load(keys, [2, 4, 6]).outcomes == (OK,) * 3
        assert [model.cache.block(block) for block in (2, 4, 6)] == want
        rig.close_gets(keys)


def test_a_staged_key_that_failed_is_left_out_of_later_rounds() -> None:
    device = StagedDevice("cpu:0")
    with rig_with(two_planes(), device, staging_bytes=300) as (rig, store, _):
        rig.open_puts(["a", "b"])
        store.bad_keys.add("a")
        written = rig.write(["a", "b"], [1, 2])
        assert written.outcomes == (Outcome.FAILED, OK)
        assert written.num_bytes == (0, NUM_LAYERS * 136)
        assert rig.close_puts(end=["b"], revoke=["a"]).ended == (OK,)


def test_blocks_outside_the_cache_are_never_read() -> None:
    with rig_with(two_planes()) as (rig, store, _):
        rig.open_puts(["a"])
        store.calls.clear()
        assert rig.write(["a"], [7]).outcomes == (Outcome.FAILED,)
        assert rig.write(["a"], [1, 2]).outcomes == (Outcome.FAILED,)
        assert rig.write(["a"], [1], 0, NUM_LAYERS + 1).outcomes == (Outcome.FAILED,)
        assert store.calls == []


def test_an_unknown_group_fails_and_opens_nothing() -> None:
    with rig_with(two_planes()) as (rig, store, _):
        store.calls.clear()
        command = OpenPuts(op=next(rig.ops), engine=ENGINE, step=1, group=9, keys=("a",))
        answer = rig.ask(command)
        assert isinstance(answer, PutsOpened)
        assert answer.outcomes == (Outcome.FAILED,)
        assert store.calls == []
