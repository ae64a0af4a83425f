import pytest

from kvworker.core.commands import Cancel, LoadLayers, UnmapEngine
from kvworker.core.events import EngineUnmapped, GetsOpened, LayersLoaded
from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO
from tests.kvworker.devices.layouts import LAYOUTS, NUM_LAYERS, head_segments, one_storage
from tests.kvworker.transfer.rig import ENGINE, OK, Model, OddStore, Rig, StagedDevice, rig_with
from tests.support.arena import Arena

KEYS = ["a", "b", "c"]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("how", ["local", "remote", "remote in twos", "staged", "staged, tiny"])
def test_another_engine_gets_the_bytes_that_were_saved(name: str, how: str) -> None:
    """Scattered blocks of one mapping, other scattered blocks of another."""
    device = StagedDevice("cpu:0") if "staged" in how else None
    layers_per_read = 2 if "twos" in how else 1
    staging_bytes = 290 if "tiny" in how else 1 << 20
    layout = LAYOUTS[name]()
    with rig_with(layout, device, layers_per_read=layers_per_read, staging_bytes=staging_bytes) as (
        rig,
        store,
        saver,
    ):
        rig.save(KEYS, [5, 1, 4])
        want = [saver.cache.block(block) for block in (5, 1, 4)]
        rig.unmap()
        loader = Model(layout, 2)
        assert rig.map(loader).error == ""
        untouched = [loader.cache.block(block) for block in (0, 1, 4, 5)]
        store.hide_local = how != "local"
        opened = rig.open_gets(KEYS)
        assert isinstance(opened, GetsOpened)
        assert opened.outcomes == (OK,) * 3
        assert opened.local is (how == "local")
        loaded = rig.load(KEYS, [2, 6, 3])
        assert loaded.outcomes == (OK,) * 3
        assert [loader.cache.block(block) for block in (2, 6, 3)] == want
        assert [loader.cache.block(block) for block in (0, 1, 4, 5)] == untouched
        assert loaded.num_bytes == 3 * layout.groups[0].object_bytes
        assert len(loaded.layer_ns) == NUM_LAYERS
        times = [loaded.started_ns, *loaded.layer_ns, loaded.now_ns]
        assert times == sorted(times)
        assert loader.page.read(1) == (NUM_LAYERS, False)
        assert ("get_ranges" in store.calls) is (how != "local")
        rig.close_gets(KEYS)
        rig.unmap()
        loader.close()


def test_an_object_of_another_size_is_missing() -> None:
    with rig_with(one_storage()) as (rig, store, _):
        rig.save(KEYS, [1, 2, 3])
        size = one_storage().groups[0].object_bytes
        store.remove_prefix("b")
        assert store.put_start(["b"], [size // 2]) == [OK]
        memory = Arena(size // 2, seed=1)
        assert store.put_ranges([memory.piece("b")]) == store.put_end(["b"]) == [OK]
        opened = rig.open_gets(KEYS)
        assert isinstance(opened, GetsOpened)
        assert opened.outcomes == (OK, Outcome.MISS, OK)
        rig.close_gets(["a", "c"])


def test_reads_of_several_layers_are_fewer_calls() -> None:
    with rig_with(one_storage(), layers_per_read=3) as (rig, store, _):
        rig.save(KEYS, [1, 2, 3])
        store.hide_local = True
        rig.open_gets(KEYS)
        rig.load(KEYS, [4, 5, 6])
        assert store.calls.count("get_ranges") == 2
        rig.close_gets(KEYS)


def test_layers_are_published_in_order_as_they_arrive() -> None:
    with rig_with(one_storage()) as (rig, store, model):
        rig.save(KEYS, [1, 2, 3])
        want = model.cache.block(1)
        store.hide_local = True
        rig.open_gets(KEYS)
        seen: list[tuple[tuple[int, bool], bool]] = []

        def look(method: str) -> None:
            # In the load thread, at the read of a layer: those before it are published.
            layers = len(seen)
            done = model.cache.block(4, range(layers))
            seen.append((model.page.read(9), done == want[: len(done)]))

        store.on_enter = look
        rig.load(KEYS, [4, 5, 6], step=9)
        store.on_enter = None
        assert seen == [((layer, False), True) for layer in range(NUM_LAYERS)]
        assert model.page.read(9) == (NUM_LAYERS, False)
        rig.close_gets(KEYS)


def load_with_bad_key(rig: Rig, store: OddStore) -> LayersLoaded:
    store.hide_local = True
    rig.open_gets(KEYS)
    store.bad_keys.add("b")
    return rig.load(KEYS, [4, 5, 6])


@pytest.mark.parametrize("device", [None, StagedDevice("cpu:0")])
def test_a_key_that_fails_is_left_out_and_the_others_go_on(device: StagedDevice | None) -> None:
    with rig_with(head_segments(), device) as (rig, store, model):
        rig.save(KEYS, [1, 2, 3])
        later = [model.cache.block(5, range(layer, layer + 1)) for layer in range(1, NUM_LAYERS)]
        loaded = load_with_bad_key(rig, store)
        assert loaded.outcomes == (OK, Outcome.FAILED, OK)
        assert model.page.read(1) == (NUM_LAYERS, True)
        assert model.cache.block(4) == model.cache.block(1)
        assert model.cache.block(6) == model.cache.block(3)
        layers = [model.cache.block(5, range(layer, layer + 1)) for layer in range(1, NUM_LAYERS)]
        assert layers == later
        object_bytes = model.cache.layout.groups[0].object_bytes
        assert loaded.num_bytes == 2 * object_bytes
        rig.close_gets(KEYS)


def test_the_end_is_published_even_if_every_key_failed() -> None:
    with rig_with(one_storage()) as (rig, store, model):
        rig.save(["a"], [1])
        rig.open_gets(["a"])
        store.hide_local = True
        store.bad_keys.add("a")
        store.calls.clear()
        loaded = rig.load(["a"], [2])
        assert loaded.outcomes == (Outcome.FAILED,)
        assert store.calls == ["get_ranges"]
        assert model.page.read(1) == (NUM_LAYERS, True)
        assert rig.load([], [], step=2).outcomes == ()
        assert model.page.read(2) == (NUM_LAYERS, False)
        rig.close_gets(["a"])


def test_a_tainted_step_ends_as_failed() -> None:
    with rig_with(one_storage()) as (rig, _, model):
        rig.save(["a"], [1])
        rig.open_gets(["a"])
        assert rig.load(["a"], [2], tainted=True).outcomes == (OK,)
        assert model.page.read(1) == (NUM_LAYERS, True)
        rig.close_gets(["a"])


def test_an_asynchronous_load_leaves_the_page_alone() -> None:
    with rig_with(one_storage()) as (rig, _, model):
        rig.save(["a"], [1])
        rig.open_gets(["a"])
        rig.ask(rig.load_command(["a"], [2], step=4, publish=False))
        assert model.page.read(4) == (0, False)
        assert model.cache.block(2) == model.cache.block(1)
        rig.close_gets(["a"])


def test_an_object_of_another_size_is_not_copied() -> None:
    with rig_with(one_storage()) as (rig, store, model):
        rig.save(["a"], [1])
        address = next(iter(store.registered))
        store.put_start(["short"], [100])
        assert store.put_ranges([RangeIO("short", [address], [100], [0])]) == [OK]
        store.put_end(["short"])
        rig.open_gets(["a", "short"])
        before = model.cache.block(3)
        assert rig.load(["a", "short"], [2, 3]).outcomes == (OK, Outcome.FAILED)
        assert model.cache.block(3) == before
        assert model.page.read(1) == (NUM_LAYERS, True)
        rig.close_gets(["a", "short"])


def test_an_object_that_went_away_while_it_was_copied_has_failed() -> None:
    with rig_with(one_storage()) as (rig, store, model):
        rig.save(["a"], [1])
        rig.open_gets(["a"])
        store.lose_local = True
        assert rig.load(["a"], [2]).outcomes == (Outcome.EXPIRED,)
        assert model.page.read(1) == (NUM_LAYERS, True)
        rig.close_gets(["a"])


def test_a_missing_key_opens_as_a_miss() -> None:
    with rig_with(one_storage()) as (rig, _, _):
        rig.save(["a"], [1])
        opened = rig.open_gets(["a", "nothing"])
        assert isinstance(opened, GetsOpened)
        assert opened.outcomes == (OK, Outcome.MISS)
        assert opened.local
        rig.close_gets(["a"])
        none = rig.open_gets(["nothing"])
        assert isinstance(none, GetsOpened)
        assert not none.local


def test_blocks_outside_the_cache_are_never_written() -> None:
    with rig_with(one_storage()) as (rig, _, model):
        rig.save(["a"], [1])
        rig.open_gets(["a"])
        before = model.cache.everything()
        assert rig.load(["a"], [7]).outcomes == (Outcome.FAILED,)
        assert model.cache.everything() == before
        assert model.page.read(1) == (NUM_LAYERS, True)
        rig.close_gets(["a"])


def stuck_load(rig: Rig, store: OddStore) -> LoadLayers:
    """A load that waits in the read of its first layer."""
    rig.save(KEYS, [1, 2, 3])
    store.hide_local = True
    rig.open_gets(KEYS)
    store.waits.add("get_ranges")
    command = rig.load_command(KEYS, [4, 5, 6])
    rig.submit(command)
    assert store.arrived.wait(20)
    return command


def test_a_cancelled_load_stops_between_layers_and_publishes_its_end() -> None:
    with rig_with(one_storage()) as (rig, store, model):
        command = stuck_load(rig, store)
        rig.submit(Cancel(op=command.op))
        store.calls.clear()
        store.resume.set()
        loaded = rig.answer(command.op)
        assert isinstance(loaded, LayersLoaded)
        assert loaded.outcomes == (Outcome.CANCELLED,) * 3
        assert len(loaded.layer_ns) == 1
        assert "get_ranges" not in store.calls
        assert model.page.read(1) == (NUM_LAYERS, True)
        rig.close_gets(KEYS)


def test_a_load_cancelled_while_it_waits_publishes_its_end_too() -> None:
    with rig_with(one_storage()) as (rig, store, model):
        first = stuck_load(rig, store)
        second = rig.load_command(KEYS, [4, 5, 6], step=2)
        rig.submit(second)
        rig.submit(Cancel(op=second.op))
        store.resume.set()
        loaded = rig.answer(second.op)
        assert isinstance(loaded, LayersLoaded)
        assert loaded.outcomes == (Outcome.CANCELLED,) * 3
        assert loaded.num_bytes == 0
        assert model.page.read(2) == (NUM_LAYERS, True)
        assert isinstance(rig.answer(first.op), LayersLoaded)
        rig.close_gets(KEYS)


def test_unmapping_waits_for_the_load_and_ends_it_early() -> None:
    with rig_with(one_storage()) as (rig, store, _):
        command = stuck_load(rig, store)
        unmap = UnmapEngine(op=next(rig.ops), engine=ENGINE)
        rig.submit(unmap)
        late = rig.load_command(KEYS, [4, 5, 6], step=2)
        rig.submit(late)
        store.resume.set()
        assert isinstance(rig.answer(unmap.op), EngineUnmapped)
        loaded = rig.answer(command.op)
        assert isinstance(loaded, LayersLoaded)
        assert loaded.outcomes == (Outcome.CANCELLED,) * 3
        # The memory was let go only after the load had been answered.
        assert rig.events.index(loaded) < rig.events.index(rig.answer(unmap.op))
        after = rig.answer(late.op)
        assert isinstance(after, LayersLoaded)
        assert after.outcomes == (Outcome.CANCELLED,) * 3
        assert store.registered == {}
        rig.close_gets(KEYS)


def test_an_error_of_our_own_still_publishes_the_end() -> None:
    with rig_with(one_storage()) as (rig, store, model):
        rig.save(KEYS, [1, 2, 3])
        store.hide_local = True
        rig.open_gets(KEYS)
        store.raises.add("get_ranges")
        assert rig.load(KEYS, [4, 5, 6]).outcomes == (Outcome.FAILED,) * 3
        assert model.page.read(1) == (NUM_LAYERS, True)
        store.raises.clear()
        assert rig.load(KEYS, [4, 5, 6], step=2).outcomes == (OK,) * 3
        assert model.page.read(2) == (NUM_LAYERS, False)
        rig.close_gets(KEYS)
