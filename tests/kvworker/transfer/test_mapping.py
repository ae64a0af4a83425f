from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvcommon.memory.handles import FileHandle
from kvcommon.memory.page import expected_answer
from kvcommon.messages import Attach
from kvworker.core.commands import MapEngine
from kvworker.core.events import EngineMapped
from tests.kvworker.devices.layouts import LAYOUTS, one_storage, storage_per_layer
from tests.kvworker.transfer.rig import ENGINE, Model, OddStore, Rig, StagedDevice, rig_with


@pytest.fixture
def store() -> OddStore:
    return OddStore()


@pytest.fixture
def rig(store: OddStore) -> Iterator[Rig]:
    made = Rig(store)
    yield made
    made.close()


def held() -> tuple[int, int]:
    """Open files and mappings of KV caches and pages."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len(list(Path("/proc/self/fd").iterdir())), maps.count("memfd:kv")


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_attach_maps_registers_and_answers(name: str, rig: Rig, store: OddStore) -> None:
    model = Model(LAYOUTS[name](), 1)
    before = held()
    answer = rig.map(model)
    assert answer.error == ""
    assert answer.capabilities == ("direct",)
    assert sorted(store.registered.values()) == sorted(model.cache.layout.storage_bytes)
    assert model.page.answered() == expected_answer(model.page.nonce)
    rig.unmap()
    assert store.registered == {}
    assert held() == before
    model.close()


def attach_with(model: Model, trouble: str) -> Attach:
    attach, layout = model.attach(), model.cache.layout
    storage, page = model.cache.handles[1], model.page.handle.storage
    assert isinstance(page, FileHandle)
    if trouble == "another file":
        bad = msgspec.structs.replace(storage, st_ino=1)
        return msgspec.structs.replace(attach, storages=(model.cache.handles[0], bad))
    if trouble == "layout says":
        sizes = (layout.storage_bytes[0] - 1, *layout.storage_bytes[1:])
        smaller = msgspec.structs.replace(layout, storage_bytes=sizes)
        return msgspec.structs.replace(attach, layout=smaller)
    if trouble == "ends at byte":
        group = msgspec.structs.replace(layout.groups[0], num_blocks=8)
        return msgspec.structs.replace(
            attach, layout=msgspec.structs.replace(layout, groups=(group,))
        )
    if trouble == "cannot open":
        gone = msgspec.structs.replace(page, fd=1_000_000)
        handle = msgspec.structs.replace(attach.page, storage=gone)
        return msgspec.structs.replace(attach, page=handle)
    return attach


@pytest.mark.parametrize(
    "trouble",
    [
        "another file",
        "layout says",
        "ends at byte",
        "cannot open",
        "refuses memory of the KV cache",
    ],
)
def test_whatever_goes_wrong_everything_is_undone(trouble: str, rig: Rig, store: OddStore) -> None:
    model = Model(storage_per_layer(), 1)
    store.refuse_from = 2
    before = held()
    attach = attach_with(model, trouble)
    answer = rig.ask(MapEngine(op=next(rig.ops), engine=ENGINE, attach=attach))
    assert isinstance(answer, EngineMapped)
    assert trouble in answer.error
    assert answer.capabilities == ()
    assert store.registered == {}
    assert held() == before
    assert model.page.answered() == 0
    # And the same engine can come back.
    store.refuse_from = 100
    assert rig.map(model).error == ""
    rig.unmap()
    model.close()


def test_an_error_names_its_remedy(rig: Rig) -> None:
    model = Model(one_storage(), 1)
    attach = msgspec.structs.replace(
        model.attach(), storages=(msgspec.structs.replace(model.cache.handles[0], pid=1 << 30),)
    )
    answer = rig.ask(MapEngine(op=next(rig.ops), engine=ENGINE, attach=attach))
    assert isinstance(answer, EngineMapped)
    assert "cannot open" in answer.error
    assert "must be alive" in answer.remedy
    model.close()


def test_a_second_attach_replaces_the_first(rig: Rig, store: OddStore) -> None:
    first, second = Model(one_storage(), 1), Model(one_storage(), 2)
    rig.map(first)
    assert rig.map(second).error == ""
    assert len(store.registered) == 1
    rig.save(["a"], [1])
    rig.open_gets(["a"])
    before = first.cache.everything()
    rig.load(["a"], [3])
    assert first.cache.everything() == before
    assert second.cache.block(3) == second.cache.block(1)
    rig.close_gets(["a"])
    first.close()
    second.close()


def test_engines_live_side_by_side(rig: Rig, store: OddStore) -> None:
    first, second = Model(one_storage(), 1), Model(one_storage(), 2)
    rig.map(first, "one#0")
    rig.map(second, "two#0")
    assert len(store.registered) == 2
    rig.unmap("one#0")
    assert len(store.registered) == 1
    rig.unmap("one#0")
    rig.unmap("two#0")
    assert store.registered == {}
    first.close()
    second.close()


def test_staging_is_registered_instead_of_the_engines_memory() -> None:
    with rig_with(one_storage(), StagedDevice("cpu:0"), staging_bytes=5000) as (rig, store, _):
        assert list(store.registered.values()) == [5000, 5000]
        rig.unmap()
        assert len(store.registered) == 2


def test_a_layer_too_large_for_the_staging_is_refused(store: OddStore) -> None:
    rig = Rig(store, StagedDevice("cpu:0"), staging_bytes=90)
    model = Model(one_storage(), 1)
    assert "has 96 bytes" in rig.map(model).error
    rig.close()
    model.close()
    assert store.registered == {}


def test_an_error_of_a_library_is_answered_and_undone(rig: Rig, store: OddStore) -> None:
    model = Model(storage_per_layer(), 1)
    before = held()
    store.raise_from = 2
    answer = rig.map(model)
    assert answer.error == "RuntimeError: register: as the test wished"
    assert store.registered == {}
    assert held() == before
    model.close()


def test_engines_that_come_and_go_leave_nothing(rig: Rig, store: OddStore) -> None:
    before = held()
    for _ in range(50):
        model = Model(one_storage(), 1)
        assert rig.map(model).error == ""
        # The engine dies first: its files are closed before the daemon lets go.
        model.close()
        rig.unmap()
    assert store.registered == {}
    assert held() == before
