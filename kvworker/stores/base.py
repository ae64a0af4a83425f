"""The store interface: sessions on objects, one object per block and rank.

Threading: every method may be called from any transfer thread; an implementation locks what it
must, and no method runs under a lock of the caller. A call may block for as long as the store
does (a frozen Mooncake master: 30 s), so the shell never calls one itself.

Single keys never raise: each gets an ``Outcome``. ``StoreError`` is raised by ``open`` alone.
Implementor's duties: a result list has one entry per key, in order; a short or empty answer of a
client library is turned into ``FAILED``; nothing is called after ``close``; a duplicate key within
one call, and a key that this store already has open for writing, get ``EXISTS``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from kvcommon.messages import StoreState
from kvworker.outcome import Outcome


class RangeIO(NamedTuple):
    """A scattered piece of one object: parallel sequences, in bytes."""

    key: str
    #: Addresses in memory that was registered, or (for a store of this process) any memory.
    addresses: Sequence[int]
    sizes: Sequence[int]
    #: Where each piece lies in the object.
    offsets: Sequence[int]


class LocalObject(NamedTuple):
    """Where an object lies in this process's memory, valid while its get session is open.

    A session can be lost without our doing (a master that restarted or froze). Whoever copies from
    here therefore asks ``local`` again afterwards: another answer means that the copy is worthless.
    """

    address: int
    size: int


def fits(piece: RangeIO, object_size: int) -> bool:
    """Tell whether a piece is well formed and lies within an object of this size."""
    count = len(piece.sizes)
    if not count or len(piece.addresses) != count or len(piece.offsets) != count:
        return False
    return all(
        size > 0 and offset >= 0 and offset + size <= object_size
        for size, offset in zip(piece.sizes, piece.offsets, strict=True)
    )


def covers(piece: RangeIO) -> bool:
    """Tell whether a piece covers an object of its own size from offset 0, in order, gapless."""
    end = 0
    for size, offset in zip(piece.sizes, piece.offsets, strict=False):
        if offset != end:
            return False
        end += size
    return fits(piece, end)


class Store(ABC):
    """A place for KV objects. See the module docstring for the rules."""

    #: For people and logs: ``mooncake`` or ``memory``.
    name: str
    #: ``put_objects`` moves bytes several times faster here than a put session does, because the
    #: objects land in this process's memory. Settled by ``open``.
    whole_puts: bool = False
    #: ``register`` takes the memory of an accelerator too. Settled when the store is made.
    device_memory: bool = False

    @abstractmethod
    def open(self) -> None:
        """Connect. Raises ``StoreError`` with a remedy if that cannot work."""

    @abstractmethod
    def close(self) -> None:
        """Revoke open puts, end open gets, disconnect. Idempotent. Later calls answer DOWN."""

    @abstractmethod
    def register(self, address: int, size: int, location: str = "cpu") -> bool:
        """Make memory usable in ``RangeIO``. False: the store cannot use this memory.

        ``location`` says what it is: ``cpu``, or an accelerator's kind. No library is left to
        guess.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo ``register``."""

    @abstractmethod
    def find(self, keys: Sequence[str]) -> list[Outcome]:
        """OK (readable now, lease taken), MISS or DOWN for each key."""

    @abstractmethod
    def is_local(self, keys: Sequence[str]) -> bool:
        """True if every one of these stored keys is surely in this process's memory."""

    @abstractmethod
    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """Reserve objects of these sizes in one call. OK, EXISTS, FULL, DOWN or FAILED each."""

    @abstractmethod
    def put_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """Write pieces into objects that this store has open, in one call."""

    @abstractmethod
    def put_end(self, keys: Sequence[str]) -> list[Outcome]:
        """Publish objects. The caller has made sure that every byte was written."""

    @abstractmethod
    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        """Discard objects that are open for writing."""

    def put_objects(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """Store and publish whole objects in one call, without a put session of the caller's.

        Each range must cover its object from offset 0 without gaps, in order; the object's size is
        their sum. OK may mean "stored before": a store that cannot tell leaves another writer's
        object of the same key in place and says OK; one that can says EXISTS. Where ``whole_puts``
        is true and the sources keep until the verdict, this is the cheapest way to save.
        """
        sizes = [sum(piece.sizes) for piece in ranges]
        answer = [Outcome.FAILED] * len(ranges)
        keys = [piece.key for piece in ranges]
        started = [i for i, piece in enumerate(ranges) if covers(piece)]
        opened = self.put_start([keys[i] for i in started], [sizes[i] for i in started])
        for i, outcome in zip(started, opened, strict=True):
            answer[i] = outcome
        open_now = [i for i, outcome in zip(started, opened, strict=True) if outcome is Outcome.OK]
        written = self.put_ranges([ranges[i] for i in open_now])
        good = [i for i, outcome in zip(open_now, written, strict=True) if outcome is Outcome.OK]
        for i, outcome in zip(open_now, written, strict=True):
            answer[i] = outcome
        for i, outcome in zip(good, self.put_end([keys[i] for i in good]), strict=True):
            answer[i] = outcome
        bad = [i for i in open_now if i not in set(good)]
        if bad:
            self.put_revoke([keys[i] for i in bad])
        return answer

    @abstractmethod
    def get_start(self, keys: Sequence[str], sizes: Sequence[int] | None = None) -> list[Outcome]:
        """Open for reading and hold the lease. Each OK is one reference.

        ``sizes`` says how large each object must be. One of another size is of no use to anybody,
        and it is in the way of a good one: it is a MISS here, then for ``find`` too, and is removed
        as soon as that is safe. Without sizes none is checked.
        """

    @abstractmethod
    def local(self, key: str) -> LocalObject | None:
        """Where an object open for reading lies in this process, if it does."""

    @abstractmethod
    def get_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """Read pieces of objects open for reading, in one call; reopens before a lease ends."""

    @abstractmethod
    def get_end(self, keys: Sequence[str]) -> None:
        """Give back one reference per key; the last one ends the session."""

    @abstractmethod
    def remove_prefix(self, prefix: str) -> int:
        """Remove the objects whose key begins so; returns how many (those in use may stay)."""

    @abstractmethod
    def probe(self) -> StoreState:
        """Ask the store something real (``health_check`` of a client library does not count)."""

    def metrics(self) -> dict[str, float]:
        """Counters and gauges, by metric name."""
        return {}
