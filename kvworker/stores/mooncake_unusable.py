"""Objects of the wrong size, remembered until they are gone. Pure: time is told.

An object's size follows from its key, so one of another size (a write that was cut short) is of no
use to anybody, and it keeps its key from being stored anew. It cannot be removed at once: whoever
opened it took its lease, and removing against a lease could take away the bytes from under a reader
of a good object that another daemon has put there meanwhile. So it counts as not stored from now
on, no question of ours takes its lease again, and once the lease is over it is removed.

Not thread-safe: the store holds a lock around each method.
"""

#: Objects remembered at most; the oldest is forgotten first, and found wrong again if need be.
MAX_OBJECTS = 1024
#: After so many leases it is forgotten: others keep it leased, so it may be a good one by now.
FORGET_LEASES = 6


class Unusable:
    """The unusable objects that a client knows of.

    Args:
        lease_ns: How long the master's lease lasts.
        limit: Objects remembered at most.
    """

    def __init__(self, lease_ns: int, limit: int = MAX_OBJECTS) -> None:
        self._lease_ns = lease_ns
        self._limit = limit
        #: Key → when its last lease of ours began, oldest first.
        self._since_ns: dict[str, int] = {}

    def __len__(self) -> int:
        """How many are known."""
        return len(self._since_ns)

    def __contains__(self, key: str) -> bool:
        """Tell whether this one is."""
        return key in self._since_ns

    def add(self, key: str, now_ns: int) -> None:
        """An object was found unusable by a call that has just ended."""
        self._since_ns.pop(key, None)
        self._since_ns[key] = now_ns
        if len(self._since_ns) > self._limit:
            del self._since_ns[next(iter(self._since_ns))]

    def discard(self, key: str) -> None:
        """It is gone, or was stored anew."""
        self._since_ns.pop(key, None)

    def due(self, now_ns: int) -> list[str]:
        """Return those whose lease is over, to be removed; forget those that stay for too long."""
        for key, since in list(self._since_ns.items()):
            if now_ns - since > FORGET_LEASES * self._lease_ns:
                del self._since_ns[key]
        return [key for key, since in self._since_ns.items() if now_ns - since > self._lease_ns]
