"""Get sessions shared by reference count, with the clocks of their leases. Pure: time is told.

A Mooncake client has at most one get session per key: starting it again replaces it, ending it
once ends it for everybody. So we count, and only the last user's end reaches the client.

A session's lease was taken when the call that opened it *began*, at the earliest. It is fresh until
half of that lease is over; then it should be opened again. Past the whole lease the master may have
given the object's memory to somebody else, so nothing read from then on can be trusted.

Not thread-safe: the store holds a lock around each method, and around nothing else.
"""

from collections.abc import Iterable, Sequence

from kvworker.stores.base import LocalObject


class _Session:
    """One key's session."""

    __slots__ = ("lease_end_ns", "local", "looked", "references", "size")

    def __init__(self) -> None:
        self.references = 0
        #: 0: not open (not yet, or lost).
        self.lease_end_ns = 0
        #: Where the object lies, once ``looked`` is true.
        self.local: LocalObject | None = None
        #: Of the object; 0: not known.
        self.size = 0
        self.looked = False


class GetSessions:
    """The sessions of one client.

    Args:
        lease_ns: How long the master's lease lasts.
    """

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._sessions: dict[str, _Session] = {}

    def keys(self) -> list[str]:
        """All keys that somebody refers to."""
        return list(self._sessions)

    def acquire(self, keys: Sequence[str], now_ns: int) -> list[str]:
        """Add a reference per key (twice for a key named twice); return the keys to open now.

        Each of those is answered by ``opened`` or ``lost``, and a reference that is of no use is
        given back with ``release``.
        """
        for key in keys:
            self._sessions.setdefault(key, _Session()).references += 1
        return self.stale(keys, now_ns)

    def stale(self, keys: Iterable[str], now_ns: int) -> list[str]:
        """Those of these keys that are not fresh, each once, in order."""
        answer: dict[str, None] = {}
        for key in keys:
            session = self._sessions.get(key)
            if session is not None and session.lease_end_ns - now_ns <= self._lease_ns // 2:
                answer[key] = None
        return list(answer)

    def opened(self, key: str, asked_ns: int) -> None:
        """The client opened this session with a call that began at ``asked_ns``."""
        session = self._sessions.get(key)
        if session is not None:
            if not session.lease_end_ns:
                session.looked = False
            session.lease_end_ns = max(session.lease_end_ns, asked_ns + self._lease_ns)

    def lost(self, key: str) -> None:
        """The client has no session on this key any more."""
        session = self._sessions.get(key)
        if session is not None:
            session.lease_end_ns = 0
            session.local = None
            session.looked = False

    def is_open(self, key: str, now_ns: int) -> bool:
        """True while the lease surely lasts."""
        session = self._sessions.get(key)
        return session is not None and now_ns < session.lease_end_ns

    def is_held(self, key: str) -> bool:
        """True if anybody refers to this key."""
        return key in self._sessions

    def release(self, keys: Sequence[str]) -> list[str]:
        """Take one reference away per key; return the keys that nobody refers to any more."""
        ended = []
        for key in keys:
            session = self._sessions.get(key)
            if session is None:
                continue
            session.references -= 1
            if not session.references:
                del self._sessions[key]
                ended.append(key)
        return ended

    def unlooked(self) -> list[str]:
        """Open sessions of which nobody has asked yet where the object lies."""
        return [
            key
            for key, session in self._sessions.items()
            if session.lease_end_ns and not session.looked
        ]

    def place(self, key: str, local: LocalObject | None, size: int = 0) -> None:
        """Remember where the object of this session lies (None: in another process), and its size.

        A size of 0 means that it could not be learnt.
        """
        session = self._sessions.get(key)
        if session is not None and session.lease_end_ns:
            session.local = local
            session.size = size
            session.looked = True

    def size(self, key: str) -> int:
        """How large the object of an open session is; 0 if that is not known."""
        session = self._sessions.get(key)
        return session.size if session is not None and session.lease_end_ns else 0

    def local(self, key: str, now_ns: int) -> LocalObject | None:
        """Where the object lies in this process, if it does and the lease lasts."""
        session = self._sessions.get(key)
        return session.local if session is not None and now_ns < session.lease_end_ns else None
