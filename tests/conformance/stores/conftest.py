"""Stores for the conformance suite: the embedded one, and Mooncake with a real master."""

import os
from collections.abc import Callable, Iterator

import pytest

from kvcommon.config import MooncakeConfig
from kvworker.stores.base import Store
from kvworker.stores.memory import MemoryStore
from kvworker.stores.mooncake import MooncakeStore
from localmaster import LocalMaster, master_binary
from tests.support.arena import Arena

MIB = 1 << 20

#: ``make(limit)``: an open store with room for so many bytes.
Make = Callable[..., Store]


def _require_mooncake() -> None:
    if master_binary() is None:
        pytest.skip("the mooncake wheel is not installed (there is none for this platform)")


@pytest.fixture(scope="session")
def shared_master() -> Iterator[LocalMaster]:
    """One master for all tests that neither fill nor end it."""
    _require_mooncake()
    with LocalMaster() as master:
        pid = master.pid
        yield master
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.fixture
def own_master() -> Iterator[Callable[..., LocalMaster]]:
    """``own_master(*flags)``: a master for this test alone."""
    _require_mooncake()
    masters: list[LocalMaster] = []

    def start(*flags: str) -> LocalMaster:
        masters.append(LocalMaster(*flags))
        masters[-1].start()
        return masters[-1]

    yield start
    for master in masters:
        master.stop()


@pytest.fixture
def connect() -> Iterator[Callable[..., MooncakeStore]]:
    """``connect(master, segment=…, …)``: an open Mooncake store; closed after the test."""
    stores: list[MooncakeStore] = []

    def make(master: LocalMaster, segment: int = 64 * MIB, **more: object) -> MooncakeStore:
        config = MooncakeConfig(
            master_server_address=master.address,
            global_segment_size=segment,
            **more,  # type: ignore[arg-type] # a test's own options
        )
        store = MooncakeStore(config)
        stores.append(store)
        store.open()
        return store

    yield make
    for store in stores:
        store.close()


@pytest.fixture(params=["memory", "mooncake"])
def make_store(request: pytest.FixtureRequest) -> Iterator[Make]:
    """``make_store(limit)``: each store of the suite, empty; alone with its master if limited."""
    stores: list[Store] = []

    def make(limit: int = 0) -> Store:
        store: Store
        if request.param == "memory":
            store = MemoryStore(limit or 64 * MIB)
            store.open()
            stores.append(store)
        else:
            name = "own_master" if limit else "shared_master"
            master = request.getfixturevalue(name)
            store = request.getfixturevalue("connect")(
                master("--default_kv_lease_ttl=300") if limit else master,
                segment=limit or 64 * MIB,
                store_lease_ms=300 if limit else 10000,
            )
        return store

    if request.param == "mooncake":
        _require_mooncake()
    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(make_store: Make) -> Store:
    """An open store of this test alone, with plenty of room."""
    return make_store()


@pytest.fixture(scope="session", params=["memory", "mooncake"])
def shared_store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """An open store for all tests that neither fill nor close it: closing Mooncake takes 2 s."""
    store: Store
    if request.param == "memory":
        store = MemoryStore(64 * MIB)
    else:
        master: LocalMaster = request.getfixturevalue("shared_master")
        config = MooncakeConfig(master_server_address=master.address, global_segment_size=64 * MIB)
        store = MooncakeStore(config)
    store.open()
    yield store
    store.close()


@pytest.fixture
def arena(shared_store: Store) -> Iterator[Callable[..., Arena]]:
    """``arena(object_size, count, seed)``: memory that the shared store may use."""
    arenas: list[Arena] = []

    def make(object_size: int, count: int = 1, seed: int | None = None) -> Arena:
        arenas.append(Arena(object_size, count, seed))
        assert shared_store.register(arenas[-1].address, arenas[-1].size)
        return arenas[-1]

    yield make
    for each in arenas:
        shared_store.unregister(each.address)
