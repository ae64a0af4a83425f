"""A store that comes late, never, or is misconfigured."""

import threading
from collections.abc import Sequence

import pytest

from kvcommon.errors import StoreError, StoreUnreachable
from kvcommon.messages import StoreState
from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO
from kvworker.stores.memory import MemoryStore
from kvworker.stores.opening import OpeningStore


class LateStore(MemoryStore):
    """A memory store whose ``open`` fails as it is told to."""

    def __init__(self, failures: Sequence[Exception]) -> None:
        super().__init__(1 << 20)
        self._failures = list(failures)
        self.registered: list[tuple[int, int]] = []
        self.attempts = threading.Semaphore(0)
        self.may_try = threading.Semaphore(0)

    def open(self) -> None:
        self.may_try.acquire()
        self.attempts.release()
        if self._failures:
            raise self._failures.pop(0)
        super().open()

    def register(self, address: int, size: int, location: str = "cpu") -> bool:
        self.registered.append((address, size))
        return True


def opening(inner: LateStore, failed: threading.Event | None = None) -> OpeningStore:
    return OpeningStore(inner, retry_s=[0.0], failed=(failed or threading.Event()).set)


def everything_down(store: OpeningStore) -> bool:
    piece = RangeIO("k", [1], [1], [0])
    answers = [
        store.find(["k"]),
        store.put_start(["k"], [1]),
        store.put_ranges([piece]),
        store.put_end(["k"]),
        store.put_revoke(["k"]),
        store.put_objects([piece]),
        store.get_start(["k"]),
        store.get_ranges([piece]),
    ]
    store.get_end(["k"])
    assert store.local("k") is None
    assert not store.is_local(["k"])
    assert store.remove_prefix("") == 0
    assert store.metrics() == {}
    return all(answer == [Outcome.DOWN] for answer in answers)


def test_serves_as_down_until_open_then_as_the_store() -> None:
    inner = LateStore([StoreUnreachable("nobody there")])
    store = opening(inner)
    store.open()
    assert everything_down(store)
    assert store.probe() is StoreState.DOWN
    inner.may_try.release()
    assert not store.wait(10)
    with pytest.raises(StoreUnreachable, match="nobody there"):
        store.wait(0, required=True)
    store.register(4096, 512)
    store.register(8192, 512)
    store.unregister(8192)
    inner.may_try.release()
    store._thread.join(10)
    assert store.wait(0, required=True)
    assert inner.registered == [(4096, 512)]
    assert store.find(["k"]) == [Outcome.MISS]
    assert store.put_start(["k"], [1]) == [Outcome.OK]
    assert store.probe() is StoreState.UP
    store.register(1, 2)
    assert inner.registered[-1] == (1, 2)
    store.close()
    assert store.find(["k"]) == [Outcome.DOWN]


def test_misconfiguration_is_said_once_and_ends_the_trying() -> None:
    failed = threading.Event()
    inner = LateStore([StoreUnreachable("not yet"), StoreError("no such protocol")])
    store = opening(inner, failed)
    store.open()
    inner.may_try.release()
    inner.may_try.release()
    assert failed.wait(10)
    with pytest.raises(StoreError, match="no such protocol"):
        store.wait(0)
    store._thread.join(10)
    assert not store._thread.is_alive()
    store.close()


def test_a_fault_while_opening_ends_the_daemon_instead_of_a_thread() -> None:
    failed = threading.Event()
    inner = LateStore([UnicodeError("label empty")])
    store = opening(inner, failed)
    store.open()
    inner.may_try.release()
    assert failed.wait(10)
    with pytest.raises(StoreError, match="label empty"):
        store.wait(0)
    store.close()


def test_the_same_complaint_is_not_logged_with_every_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = LateStore([*[StoreUnreachable("nobody")] * 5, StoreUnreachable("somebody else")])
    store = opening(inner)
    store.open()
    inner.may_try.release(7)
    for _ in range(7):
        assert inner.attempts.acquire(timeout=10)
    store._thread.join(10)
    lines = [record.getMessage() for record in caplog.records if "not there" in record.message]
    assert [line.rpartition(": ")[2] for line in lines] == ["nobody", "somebody else"]
    store.close()


def test_a_store_that_must_be_there_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    inner = LateStore([StoreUnreachable("nobody there")])
    store = opening(inner)
    store.open(once=True)
    inner.may_try.release()
    store._thread.join(10)
    assert not store._thread.is_alive()
    with pytest.raises(StoreUnreachable, match="nobody there"):
        store.wait(0, required=True)
    assert caplog.text == "", "whoever asked for it says it"


def test_close_while_opening_closes_what_opens_later() -> None:
    inner = LateStore([])
    store = opening(inner)
    store.open()
    store.close()
    inner.may_try.release()
    store._thread.join(10)
    assert not store._thread.is_alive()
    assert inner.find(["k"]) == [Outcome.DOWN]
    assert everything_down(store)


def test_close_ends_the_waiting() -> None:
    inner = LateStore([StoreUnreachable("never")])
    store = OpeningStore(inner, retry_s=[1000.0], failed=lambda: None)
    store.open()
    inner.may_try.release()
    store.wait(10)
    store.close()
    store._thread.join(10)
    assert not store._thread.is_alive()
