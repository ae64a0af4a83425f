"""The embedded store: objects in this process's memory, with a byte limit and LRU eviction.

The default for trying kvferry out and for tests; nothing outlives the process. Every object lies
in an anonymous mapping of its own, page-aligned, so ``local`` gives an address and copies are
plain ``memmove`` calls, which release the GIL.

Threading: one lock around the tables, never held while bytes are copied. An object that is being
copied, has a reader or is leased is not evicted.
"""

import collections
import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence

from kvcommon.messages import StoreState
from kvworker.outcome import Outcome
from kvworker.stores.base import LocalObject, RangeIO, Store, fits

#: How long ``find`` protects an object from eviction, as a Mooncake master does by default.
DEFAULT_LEASE_MS = 10_000


class _Object:
    """One object and its memory. Guarded by the store's lock, except for the bytes."""

    __slots__ = (
        "address",
        "busy",
        "leased_until_ns",
        "memory",
        "readers",
        "room",
        "size",
        "written",
    )

    def __init__(self, size: int, room: int, memory: mmap.mmap, address: int) -> None:
        self.size = size
        #: Bytes of memory it takes: ``size`` in whole pages.
        self.room = room
        self.memory = memory
        self.address = address
        #: Bytes written so far, counting a byte twice that was written twice.
        self.written = 0
        #: Open get sessions.
        self.readers = 0
        #: Copies running at this moment.
        self.busy = 0
        self.leased_until_ns = 0


class MemoryStore(Store):
    """See the module docstring.

    Args:
        limit: Bytes that objects may take, counted in whole pages.
        lease_ms: How long ``find`` keeps an object from being evicted.
        now_ns: A monotonic clock.
    """

    name = "memory"

    def __init__(
        self,
        limit: int,
        *,
        lease_ms: int = DEFAULT_LEASE_MS,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._limit = limit
        self._lease_ns = lease_ms * 1_000_000
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._closed = False
        #: Readable objects, least recently used first.
        self._objects: collections.OrderedDict[str, _Object] = collections.OrderedDict()
        self._writing: dict[str, _Object] = {}
        #: Memory of dead objects by room, for the next object of that size: touching fresh pages
        #: is several times slower than copying.
        self._spare: dict[int, list[tuple[mmap.mmap, int]]] = {}
        self._used = 0
        self._spare_bytes = 0
        self._counts: collections.Counter[str] = collections.Counter()

    def open(self) -> None:
        """Nothing to connect to."""

    def close(self) -> None:
        """Forget everything. Copies that are running finish in memory that they keep alive."""
        with self._lock:
            self._closed = True
            self._objects.clear()
            self._writing.clear()
            self._spare.clear()
            self._used = self._spare_bytes = 0

    def register(self, address: int, size: int, location: str = "cpu") -> bool:
        """Any memory of this process will do, but not that of an accelerator."""
        return not self._closed and address > 0 and size > 0 and location == "cpu"

    def unregister(self, address: int) -> None:
        """Nothing was kept."""

    def find(self, keys: Sequence[str]) -> list[Outcome]:
        """OK and a lease, or MISS."""
        with self._lock:
            if self._closed:
                return [Outcome.DOWN] * len(keys)
            until = self._now_ns() + self._lease_ns
            answer = []
            for key in keys:
                found = self._objects.get(key)
                if found is not None:
                    found.leased_until_ns = until
                    self._objects.move_to_end(key)
                answer.append(Outcome.MISS if found is None else Outcome.OK)
            return self._count("find", answer)

    def is_local(self, keys: Sequence[str]) -> bool:
        """Whatever is stored is here."""
        with self._lock:
            return all(key in self._objects for key in keys)

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """Take memory for each object, evicting what was used least recently."""
        with self._lock:
            if self._closed:
                return [Outcome.DOWN] * len(keys)
            answer = [self._start(key, size) for key, size in zip(keys, sizes, strict=False)]
            answer += [Outcome.FAILED] * (len(keys) - len(answer))
            return self._count("put_start", answer)

    def _start(self, key: str, size: int) -> Outcome:
        if not key or size <= 0:
            return Outcome.FAILED
        if key in self._objects or key in self._writing:
            return Outcome.EXISTS
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = self._take(room)
        if memory is None:
            return Outcome.FULL
        self._writing[key] = _Object(size, room, *memory)
        return Outcome.OK

    def put_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """Copy into objects that are open for writing."""
        return self._copy("put_ranges", ranges, self._writing, to_object=True)

    def put_end(self, keys: Sequence[str]) -> list[Outcome]:
        """Make objects readable. One that misses bytes is discarded instead: FAILED."""
        with self._lock:
            if self._closed:
                return [Outcome.DOWN] * len(keys)
            answer = []
            for key in keys:
                opened = self._writing.pop(key, None)
                if opened is not None and opened.written >= opened.size:
                    self._objects[key] = opened
                    answer.append(Outcome.OK)
                    continue
                if opened is not None:
                    self._drop(opened)
                answer.append(Outcome.FAILED)
            return self._count("put_end", answer)

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        """Give the memory of objects open for writing back."""
        with self._lock:
            if self._closed:
                return [Outcome.DOWN] * len(keys)
            answer = []
            for key in keys:
                opened = self._writing.pop(key, None)
                if opened is not None:
                    self._drop(opened)
                answer.append(Outcome.FAILED if opened is None else Outcome.OK)
            return self._count("put_revoke", answer)

    def get_start(self, keys: Sequence[str], sizes: Sequence[int] | None = None) -> list[Outcome]:
        """Add one reader per key that is stored. One of the wrong size goes at once, if unread."""
        with self._lock:
            if self._closed:
                return [Outcome.DOWN] * len(keys)
            answer = []
            for i, key in enumerate(keys):
                found = self._objects.get(key)
                if found is not None and sizes is not None and found.size != sizes[i]:
                    self._counts["objects_of_wrong_size"] += 1
                    if not found.readers:
                        self._drop(self._objects.pop(key))
                    found = None
                if found is not None:
                    found.readers += 1
                    self._objects.move_to_end(key)
                answer.append(Outcome.MISS if found is None else Outcome.OK)
            return self._count("get_start", answer)

    def local(self, key: str) -> LocalObject | None:
        """Every object open for reading is here."""
        with self._lock:
            found = self._objects.get(key)
            if found is None or not found.readers:
                return None
            return LocalObject(found.address, found.size)

    def get_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """Copy from objects that are open for reading."""
        return self._copy("get_ranges", ranges, self._objects, to_object=False)

    def get_end(self, keys: Sequence[str]) -> None:
        """Take one reader away per key."""
        with self._lock:
            for key in keys:
                found = self._objects.get(key)
                if found is not None and found.readers:
                    found.readers -= 1

    def remove_prefix(self, prefix: str) -> int:
        """Forget the objects of this prefix that nobody reads; an empty prefix removes nothing."""
        with self._lock:
            doomed = [
                key
                for key, found in self._objects.items()
                if prefix and key.startswith(prefix) and not found.readers
            ]
            for key in doomed:
                self._drop(self._objects.pop(key))
            return len(doomed)

    def probe(self) -> StoreState:
        """UP until it is closed."""
        return StoreState.DOWN if self._closed else StoreState.UP

    def metrics(self) -> dict[str, float]:
        """Counters of outcomes and bytes, and what is held."""
        with self._lock:
            values: dict[str, float] = dict(self._counts)
            values["objects"] = len(self._objects)
            values["bytes_used"] = self._used
            values["bytes_limit"] = self._limit
            return values

    # -- below: callers hold the lock, except _copy ------------------------------------------

    def _count(self, kind: str, answer: list[Outcome]) -> list[Outcome]:
        self._counts[f"calls_{kind}"] += 1
        self._counts[f"keys_{kind}"] += len(answer)
        for outcome in answer:
            self._counts[f"outcomes_{kind}_{outcome.value}"] += 1
        return answer

    def _copy(
        self, kind: str, ranges: Sequence[RangeIO], table: dict[str, _Object], *, to_object: bool
    ) -> list[Outcome]:
        pinned: list[_Object | None] = []
        with self._lock:
            if self._closed:
                return [Outcome.DOWN] * len(ranges)
            for piece in ranges:
                found = table.get(piece.key)
                good = found is not None and (to_object or found.readers > 0)
                good = good and found is not None and fits(piece, found.size)
                pinned.append(found if good else None)
                if good and found is not None:
                    found.busy += 1
        for piece, found in zip(ranges, pinned, strict=True):
            if found is None:
                continue
            for address, size, offset in zip(
                piece.addresses, piece.sizes, piece.offsets, strict=True
            ):
                inside = found.address + offset
                if to_object:
                    ctypes.memmove(inside, address, size)
                else:
                    ctypes.memmove(address, inside, size)
        with self._lock:
            for piece, found in zip(ranges, pinned, strict=True):
                if found is None:
                    continue
                found.busy -= 1
                moved = sum(piece.sizes)
                self._counts["bytes_written" if to_object else "bytes_read"] += moved
                if to_object:
                    found.written += moved
            answer = [Outcome.FAILED if found is None else Outcome.OK for found in pinned]
            return self._count(kind, answer)

    def _take(self, room: int) -> tuple[mmap.mmap, int] | None:
        """Memory of ``room`` bytes within the limit, or None if everything is in use."""
        if room > self._limit:
            return None
        spare = self._spare.get(room)
        if not spare and self._used + room > self._limit:
            self._evict(self._used + room - self._limit)
            spare = self._spare.get(room)
        if spare:
            self._used += room
            self._spare_bytes -= room
            return spare.pop()
        if self._used + room > self._limit:
            return None
        if self._used + self._spare_bytes + room > self._limit:
            self._spare.clear()
            self._spare_bytes = 0
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used += room
        return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def _evict(self, needed: int) -> None:
        """Drop least recently used objects until ``needed`` bytes are free, if that can be."""
        now = self._now_ns()
        doomed: list[str] = []
        for key, found in self._objects.items():
            if needed <= 0:
                break
            if not found.readers and not found.busy and found.leased_until_ns <= now:
                doomed.append(key)
                needed -= found.room
        if needed > 0:
            return
        for key in doomed:
            self._drop(self._objects.pop(key))
            self._counts["evictions"] += 1

    def _drop(self, dead: _Object) -> None:
        """Free an object's memory. A copy that still runs keeps it out of other hands."""
        self._used -= dead.room
        if not dead.busy:
            self._spare.setdefault(dead.room, []).append((dead.memory, dead.address))
            self._spare_bytes += dead.room
