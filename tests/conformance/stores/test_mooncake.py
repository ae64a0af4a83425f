"""What only Mooncake can show: other clients, leases that end, masters that die."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcommon.errors import StoreError, StoreUnreachable
from kvcommon.messages import StoreState
from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO, Store
from kvworker.stores.mooncake import MooncakeStore
from localmaster import LocalMaster
from tests.conformance.stores.conftest import MIB
from tests.support.arena import Arena, get, put

OK, MISS, EXISTS, DOWN, FAILED = (
    Outcome.OK,
    Outcome.MISS,
    Outcome.EXISTS,
    Outcome.DOWN,
    Outcome.FAILED,
)
SIZE = 65536

Connect = Callable[..., MooncakeStore]
OwnMaster = Callable[..., LocalMaster]


def _arena(store: Store, count: int = 4, seed: int | None = None) -> Arena:
    arena = Arena(SIZE, count, seed)
    assert store.register(arena.address, arena.size)
    return arena


def _until(check: Callable[[], bool], what: str) -> None:
    """Ask again until it is so; the master needs its time for some things."""
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def _tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def test_a_key_that_another_client_writes_is_taken(
    shared_master: LocalMaster, connect: Connect
) -> None:
    ours, theirs = connect(shared_master), connect(shared_master)
    source, target = _arena(ours, seed=1), _arena(theirs)
    assert ours.put_start(["two-clients"], [SIZE]) == [OK]
    assert theirs.put_start(["two-clients"], [SIZE]) == [EXISTS]
    assert theirs.find(["two-clients"]) == [MISS]
    assert theirs.get_start(["two-clients"]) == [MISS]
    assert theirs.put_end(["two-clients"]) == [FAILED]
    ours.put_ranges([source.piece("two-clients")])
    assert ours.put_end(["two-clients"]) == [OK]
    assert theirs.put_start(["two-clients"], [SIZE]) == [EXISTS]
    assert get(theirs, target, "two-clients") == source.object()


def test_each_client_puts_into_its_own_segment_and_knows_it(
    shared_master: LocalMaster, connect: Connect
) -> None:
    ours, theirs = connect(shared_master), connect(shared_master)
    keys = [f"own-{i}" for i in range(4)]
    source = _arena(ours, seed=2)
    assert ours.whole_puts
    put(ours, source, *keys[:2])
    assert ours.put_objects([source.piece(key, i) for i, key in enumerate(keys)][2:]) == [OK, OK]
    assert ours.is_local(keys)
    assert not theirs.is_local(keys[:1])
    assert theirs.get_start(keys) == [OK] * 4
    assert [theirs.local(key) for key in keys] == [None] * 4
    theirs.get_end(keys)
    assert ours.get_start(keys) == [OK] * 4
    for i, key in enumerate(keys):
        found = ours.local(key)
        assert found is not None
        assert ctypes.string_at(found.address, found.size) == source.object(i)
    ours.get_end(keys)


def test_a_client_without_a_segment_stores_with_others(
    shared_master: LocalMaster, connect: Connect
) -> None:
    owner, guest = connect(shared_master), connect(shared_master, segment=0)
    source, target = _arena(guest, seed=3), _arena(owner)
    assert not guest.whole_puts
    put(guest, source, "guest")
    guest.get_start(["guest"])
    assert guest.local("guest") is None
    guest.get_end(["guest"])
    assert not guest.is_local(["guest"])
    assert get(owner, target, "guest") == source.object()


def test_very_many_pieces_reach_another_process_s_segment(
    shared_master: LocalMaster, connect: Connect
) -> None:
    """Above 2048 in one call the library would fail them."""
    owner, guest = connect(shared_master), connect(shared_master, segment=0)
    source, target = _arena(guest, 40, seed=12), _arena(owner, 40)
    keys = [f"many-{i}" for i in range(40)]
    pieces = [source.layers(key, i, range(64), SIZE // 64) for i, key in enumerate(keys)]
    assert guest.put_objects(pieces) == [OK] * 40
    assert get(owner, target, keys[-1], 39) == source.object(39)


def test_another_segment_can_be_preferred(shared_master: LocalMaster, connect: Connect) -> None:
    owner = connect(shared_master)
    other = connect(shared_master, preferred_segment=owner._client.hostname())
    source = _arena(other, seed=4)
    put(other, source, "elsewhere")
    assert owner.is_local(["elsewhere"])
    assert not other.is_local(["elsewhere"])


def test_memory_that_is_not_there_fails(shared_master: LocalMaster, connect: Connect) -> None:
    store = connect(shared_master)
    source = _arena(store, seed=5)
    put(store, source, "nowhere")
    first_page = RangeIO("nowhere", [4096], [4096], [0])  # Linux never maps it
    store.get_start(["nowhere"])
    assert store.get_ranges([first_page]) == [FAILED]
    store.get_end(["nowhere"])
    assert not store.register(source.address, source.size), "registered already"
    store.unregister(source.address)
    assert store.register(source.address, source.size)


def test_the_probe_object_is_not_left_behind(shared_master: LocalMaster, connect: Connect) -> None:
    assert connect(shared_master).remove_prefix("kvf1-probe-") == 0


def test_threads_of_the_library_give_way(shared_master: LocalMaster, connect: Connect) -> None:
    before = _tasks()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    store = connect(shared_master)
    born = _tasks() - before
    ours = {store._keeper.native_id, store._warmer._thread.native_id if store._warmer else None}
    nice = {os.getpriority(os.PRIO_PROCESS, task) for task in born - ours}
    assert nice == {max(own, 10)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_a_session_outlives_the_master_s_lease(own_master: OwnMaster, connect: Connect) -> None:
    """The keeper renews it, so what ``local`` gave out stays valid."""
    store = connect(own_master("--default_kv_lease_ttl=400"), store_lease_ms=400)
    source = _arena(store, seed=6)
    put(store, source, "kept")
    store.get_start(["kept"])
    found = store.local("kept")
    renewals = store.metrics()["calls_batch_get_session_start"] + 3
    _until(lambda: store.metrics()["calls_batch_get_session_start"] >= renewals, "not renewed")
    assert found is not None
    assert store.local("kept") == found
    assert ctypes.string_at(found.address, SIZE) == source.object()
    store.get_end(["kept"])


def test_a_lease_that_ended_is_taken_again_once(own_master: OwnMaster, connect: Connect) -> None:
    """Told a longer lease than the master gives, the store learns it from the failure."""
    store = connect(own_master("--default_kv_lease_ttl=100"), store_lease_ms=60_000)
    source, target = _arena(store, seed=7), _arena(store)
    put(store, source, "lapsed")
    store.get_start(["lapsed"])
    time.sleep(0.3)  # the lease is over; there is no event to wait for
    assert store.get_ranges([target.piece("lapsed")]) == [OK]
    assert store.metrics()["calls_batch_get_session_start"] == 2
    assert target.object() == source.object()
    store.get_end(["lapsed"])


def test_an_object_that_went_with_its_lease_is_a_miss(
    own_master: OwnMaster, connect: Connect
) -> None:
    store = connect(own_master("--default_kv_lease_ttl=100"), store_lease_ms=60_000)
    source, target = _arena(store, seed=8), _arena(store)
    put(store, source, "removed", "stays")
    store.get_start(["removed", "stays"])
    _until(lambda: store.remove_prefix("removed") == 1, "still leased")
    pieces = [target.piece("removed", 0), target.piece("stays", 1)]
    assert store.get_ranges(pieces) == [MISS, OK]
    assert target.object(1) == source.object(1)
    assert store.local("removed") is None
    store.get_end(["removed", "stays"])


def test_a_dead_master_is_down_and_a_new_one_is_found(
    own_master: OwnMaster, connect: Connect
) -> None:
    master = own_master()
    store = connect(master)
    source, target = _arena(store, seed=9), _arena(store)
    put(store, source, "before")
    store.put_start(["open"], [SIZE])
    store.put_ranges([source.piece("open")])
    master.kill()
    assert store.probe() is StoreState.DOWN
    assert store.find(["before"]) == [DOWN]
    assert store.put_end(["open"]) == [DOWN]
    assert store.put_start(["new"], [SIZE]) == [DOWN]
    assert store.get_start(["before"]) == [DOWN]
    master.start()
    _until(lambda: store.probe() is StoreState.UP, "still down")
    assert store.find(["before"]) == [MISS]
    _until(lambda: store.put_objects([source.piece("after")]) == [OK], "no segment")
    assert get(store, target, "after") == source.object()
    _until(lambda: store.put_start(["open"], [SIZE]) == [OK], "key not free")
    assert store.put_revoke(["open"]) == [OK]


def test_closing_does_not_wait_for_a_dead_master(own_master: OwnMaster, connect: Connect) -> None:
    """The library's own close would hold the interpreter for many seconds."""
    master = own_master()
    store = connect(master)
    source = _arena(store, seed=10)
    put(store, source, "left")
    store.get_start(["left"])
    master.kill()
    store.close()
    assert store.find(["left"]) == [DOWN]
    assert store.local("left") is None
    # What was left open would hold up the end of this process.
    master.start()
    store._client._raw.close()


def test_a_frozen_master_is_down_after_the_library_s_own_timeout(
    own_master: OwnMaster, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "300")
    master = own_master()
    store = connect(master)
    source, target = _arena(store, seed=11), _arena(store)
    put(store, source, "frozen")
    store.get_start(["frozen"])
    master.freeze()
    try:
        assert store.probe() is StoreState.DOWN
        assert store.get_ranges([target.piece("frozen")]) == [OK], "under its lease"
    finally:
        master.thaw()
    _until(lambda: store.probe() is StoreState.UP, "still down")
    store.get_end(["frozen"])


def test_a_missing_master_says_how_to_start_one(own_master: OwnMaster, connect: Connect) -> None:
    master = own_master()
    master.kill()
    with pytest.raises(StoreUnreachable, match="mooncake_master"):
        connect(master)
    master.start()
    assert connect(master).probe() is StoreState.UP


def test_an_unknown_protocol_is_refused(shared_master: LocalMaster, connect: Connect) -> None:
    with pytest.raises(StoreError, match="pigeon"):
        connect(shared_master, protocol="pigeon", segment=16 * MIB)
