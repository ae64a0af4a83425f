import mmap

from kvworker.outcome import Outcome
from kvworker.stores.memory import MemoryStore
from tests.support.arena import Arena, get, put

PAGE = mmap.PAGESIZE
OK, MISS, FULL = Outcome.OK, Outcome.MISS, Outcome.FULL


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def test_objects_are_page_aligned_and_counted_in_whole_pages() -> None:
    store = MemoryStore(2 * PAGE)
    put(store, Arena(100, 2, seed=1), "a", "b")
    store.get_start(["a"])
    found = store.local("a")
    assert found is not None
    assert found.address % PAGE == 0
    assert found.size == 100
    assert store.metrics()["bytes_used"] == 2 * PAGE


def test_the_least_recently_used_object_goes_first() -> None:
    store = MemoryStore(3 * PAGE)
    source = Arena(PAGE, 3, seed=1)
    put(store, source, "a", "b", "c")
    get(store, Arena(PAGE), "a")
    put(store, source, "d")
    store.put_start(["e"], [PAGE])
    assert store.get_start(["a", "b", "c", "d"]) == [OK, MISS, MISS, OK]
    assert store.metrics()["evictions"] == 2


def test_a_lease_protects_until_it_ends() -> None:
    clock = Clock()
    store = MemoryStore(PAGE, lease_ms=10, now_ns=clock)
    put(store, Arena(PAGE, seed=1), "a")
    assert store.find(["a"]) == [OK]
    assert store.put_start(["b"], [PAGE]) == [FULL]
    clock.now_ns = 10_000_000
    assert store.put_start(["b"], [PAGE]) == [OK]
    assert store.find(["a"]) == [MISS]


def test_nothing_is_evicted_for_an_object_that_finds_no_room_anyway() -> None:
    store = MemoryStore(3 * PAGE)
    source = Arena(PAGE, 2, seed=1)
    put(store, source, "a", "b")
    store.get_start(["b"])
    assert store.put_start(["large"], [3 * PAGE]) == [FULL]
    assert store.find(["a", "b"]) == [OK, OK]


def test_memory_of_dead_objects_serves_new_ones_of_any_size() -> None:
    store = MemoryStore(4 * PAGE)
    source = Arena(PAGE, 4, seed=1)
    put(store, source, "a", "b", "c", "d")
    assert store.remove_prefix("a") == 1
    put(store, source, "a")
    large = Arena(3 * PAGE, seed=2)
    put(store, large, "large")
    assert get(store, Arena(3 * PAGE), "large") == large.object()
    assert store.metrics()["bytes_used"] == 4 * PAGE


def test_an_object_with_a_reader_survives_removal() -> None:
    store = MemoryStore(4 * PAGE)
    put(store, Arena(PAGE, 2, seed=1), "p-a", "p-b")
    store.get_start(["p-a"])
    assert store.remove_prefix("p-") == 1
    assert store.get_start(["p-a", "p-b"]) == [OK, MISS]


def test_closing_frees_everything() -> None:
    store = MemoryStore(4 * PAGE)
    put(store, Arena(PAGE, seed=1), "a")
    store.put_start(["b"], [PAGE])
    store.close()
    assert store.metrics()["bytes_used"] == 0
    assert store.metrics()["objects"] == 0
