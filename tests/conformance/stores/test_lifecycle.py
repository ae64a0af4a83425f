"""Closing, memory, metrics, and many threads at once."""

import threading

import pytest

from kvcommon.messages import StoreState
from kvworker.outcome import Outcome
from kvworker.stores.base import Store
from tests.conformance.stores.conftest import Make
from tests.support.arena import Arena, get, put

SIZE = 8192


@pytest.fixture
def source(store: Store) -> Arena:
    arena = Arena(SIZE, count=4, seed=6)
    assert store.register(arena.address, arena.size)
    return arena


def test_an_open_store_is_up(store: Store) -> None:
    assert store.probe() is StoreState.UP


def test_after_close_everything_is_down(store: Store, source: Arena) -> None:
    put(store, source, "stored")
    store.get_start(["stored"])
    store.put_start(["open"], [SIZE])
    store.close()
    store.close()
    down = [Outcome.DOWN]
    assert store.probe() is StoreState.DOWN
    assert store.find(["stored"]) == down
    assert store.put_start(["new"], [SIZE]) == down
    assert store.put_ranges([source.piece("open")]) == down
    assert store.put_end(["open"]) == down
    assert store.put_revoke(["open"]) == down
    assert store.put_objects([source.piece("new")]) == down
    assert store.get_start(["stored"]) == down
    assert store.get_ranges([source.piece("stored")]) == down
    assert store.local("stored") is None
    assert not store.is_local(["stored"])
    assert not store.register(source.address, source.size)
    assert store.remove_prefix("s") == 0
    store.get_end(["stored"])
    store.unregister(source.address)


def test_unusable_memory_is_refused(store: Store) -> None:
    assert not store.register(0, SIZE)
    assert not store.register(4096, 0)


def test_calls_are_counted(store: Store, source: Arena) -> None:
    put(store, source, "counted")
    target = Arena(SIZE)
    store.register(target.address, target.size)
    get(store, target, "counted")
    store.find(["counted", "absent"])
    metrics = store.metrics()
    assert metrics["bytes_written"] == metrics["bytes_read"] == SIZE
    assert metrics["outcomes_put_end_ok"] == 1
    assert metrics["outcomes_find_ok"] == metrics["outcomes_find_miss"] == 1


def test_threads_in_parallel(make_store: Make) -> None:
    store = make_store()
    threads, rounds = 6, 15
    source, target = Arena(SIZE, threads, seed=7), Arena(SIZE, threads)
    assert store.register(source.address, source.size)
    assert store.register(target.address, target.size)
    put(store, source, "common")
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(rounds):
            key = f"thread-{number}-{turn}"
            put(store, source, *[f"{key}-{i}" for i in range(threads)])
            if get(store, target, f"{key}-{number}", number) != source.object(number):
                wrong.append(key)
            if get(store, target, "common", number) != source.object(0):
                wrong.append(f"common at {key}")
            if store.put_start([f"race-{turn}"], [SIZE]) == [Outcome.OK]:
                store.put_ranges([source.piece(f"race-{turn}", number)])
                if store.put_end([f"race-{turn}"]) != [Outcome.OK]:
                    wrong.append(f"race at {key}")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert store.find([f"race-{turn}" for turn in range(rounds)]) == [Outcome.OK] * rounds


def test_closing_while_others_call(make_store: Make) -> None:
    store = make_store()
    source = Arena(SIZE, 4, seed=8)
    store.register(source.address, source.size)
    begun = threading.Barrier(4)

    def work(number: int) -> None:
        begun.wait()
        turn = 0
        while store.find([f"closing-{number}"]) != [Outcome.DOWN]:
            store.put_objects([source.piece(f"closing-{number}-{turn}", number)])
            store.get_start([f"closing-{number}-{turn}"])
            store.local(f"closing-{number}-{turn}")
            turn += 1

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    begun.wait()
    store.close()
    for worker in workers:
        worker.join()
    assert store.probe() is StoreState.DOWN
