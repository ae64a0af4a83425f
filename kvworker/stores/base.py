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
    """Where an object lies in this process's memory, valid while its get session is open."""

    address: int
    size: int


class Store(ABC):
    """A place for KV objects. See the module docstring for the rules."""

    #: For people and logs: ``mooncake`` or ``memory``.
    name: str

    @abstractmethod
    def open(self) -> None:
        """Connect. Raises ``StoreError`` with a remedy if that cannot work."""

    @abstractmethod
    def close(self) -> None:
        """Revoke open puts, end open gets, disconnect. Idempotent. Later calls answer DOWN."""

    @abstractmethod
    def register(self, address: int, size: int) -> bool:
        """Make memory usable in ``RangeIO``. False: the store cannot use this memory."""

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

    @abstractmethod
    def get_start(self, keys: Sequence[str]) -> list[Outcome]:
        """Open for reading (one call) and hold the lease. Each OK is one reference."""

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
