"""A store that counts what it is asked, for tests such as "two calls per step"."""

import collections
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvcommon.messages import StoreState
from kvworker.outcome import Outcome
from kvworker.stores.base import LocalObject, RangeIO, Store


class Call(NamedTuple):
    """One call: the method, and its keys in order."""

    method: str
    keys: tuple[str, ...]


class CountingStore(Store):
    """Passes every call on to another store and remembers it. Thread-safe as the inner store is."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.name = inner.name
        self._lock = threading.Lock()
        self._calls: list[Call] = []

    @property
    def whole_puts(self) -> bool:  # type: ignore[override] # as the inner store says at this time
        return self.inner.whole_puts

    @property
    def calls(self) -> list[Call]:
        """All calls so far, in order."""
        with self._lock:
            return list(self._calls)

    def counts(self) -> collections.Counter[str]:
        """How often each method was called."""
        return collections.Counter(call.method for call in self.calls)

    def keys(self, method: str) -> list[frozenset[str]]:
        """The set of keys of each call of a method, in order."""
        return [frozenset(call.keys) for call in self.calls if call.method == method]

    def clear(self) -> None:
        """Forget the calls so far."""
        with self._lock:
            self._calls.clear()

    def _note(self, method: str, keys: Sequence[str] = ()) -> None:
        with self._lock:
            self._calls.append(Call(method, tuple(keys)))

    def open(self) -> None:
        self._note("open")
        self.inner.open()

    def close(self) -> None:
        self._note("close")
        self.inner.close()

    def register(self, address: int, size: int, location: str = "cpu") -> bool:
        self._note("register")
        return self.inner.register(address, size, location)

    def unregister(self, address: int) -> None:
        self._note("unregister")
        self.inner.unregister(address)

    def find(self, keys: Sequence[str]) -> list[Outcome]:
        self._note("find", keys)
        return self.inner.find(keys)

    def is_local(self, keys: Sequence[str]) -> bool:
        self._note("is_local", keys)
        return self.inner.is_local(keys)

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        self._note("put_start", keys)
        return self.inner.put_start(keys, sizes)

    def put_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        self._note("put_ranges", [piece.key for piece in ranges])
        return self.inner.put_ranges(ranges)

    def put_end(self, keys: Sequence[str]) -> list[Outcome]:
        self._note("put_end", keys)
        return self.inner.put_end(keys)

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        self._note("put_revoke", keys)
        return self.inner.put_revoke(keys)

    def put_objects(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        self._note("put_objects", [piece.key for piece in ranges])
        return self.inner.put_objects(ranges)

    def get_start(self, keys: Sequence[str], sizes: Sequence[int] | None = None) -> list[Outcome]:
        self._note("get_start", keys)
        return self.inner.get_start(keys, sizes)

    def local(self, key: str) -> LocalObject | None:
        self._note("local", [key])
        return self.inner.local(key)

    def get_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        self._note("get_ranges", [piece.key for piece in ranges])
        return self.inner.get_ranges(ranges)

    def get_end(self, keys: Sequence[str]) -> None:
        self._note("get_end", keys)
        self.inner.get_end(keys)

    def remove_prefix(self, prefix: str) -> int:
        self._note("remove_prefix", [prefix])
        return self.inner.remove_prefix(prefix)

    def probe(self) -> StoreState:
        self._note("probe")
        return self.inner.probe()

    def metrics(self) -> dict[str, float]:
        return self.inner.metrics()
