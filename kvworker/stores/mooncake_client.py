"""A Mooncake client that may be called from any thread, at any time, even after it was closed.

The library's own client crashes the process when it is called after ``close``, and its ``close``
holds Python's interpreter lock for many seconds when the master is dead. So every call goes through
``MooncakeClient``, which counts the calls that run, refuses new ones once it is closing, and leaves
a client whose master does not answer unclosed: the operating system takes it with the process.
"""

import collections
import logging
import threading
from collections.abc import Sequence
from typing import Any

from kvworker.outcome import Outcome
from kvworker.stores import mooncake_codes as codes
from kvworker.stores.base import RangeIO
from kvworker.stores.complaints import Complaints

_logger = logging.getLogger("kvferry.worker")

#: Calls that ask the master, and how often.
_ROUND_TRIPS = {
    "batch_is_exist": 1,
    "batch_put_session_start": 1,
    "batch_put_session_end": 1,
    "batch_put_session_revoke": 1,
    "batch_put_from_multi_buffers": 2,
    "batch_get_session_start": 1,
    "batch_get_replica_desc": 1,
    "get_replica_desc": 1,
    "remove": 1,
    "remove_by_regex": 1,
}
#: What nobody stores: asking for it says whether the master answers.
SENTINEL = "kvf1-sentinel"
#: Buffers in one call that stores whole objects: over TCP the library fails what is beyond 2048 to
#: one peer (``MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER`` and as many pending), without a word of why.
_MAX_BUFFERS = 1024
#: How long ``close`` waits for running calls, and then for a sign of life from the master.
_DRAIN_S = 10.0
_ALIVE_S = 2.0
#: Clients that were given up. Kept, so that their destructors never run.
_ABANDONED: list[object] = []


class MooncakeClient:
    """One ``MooncakeDistributedStore`` that has been set up.

    Args:
        raw: The library's object; None: not connected yet, which is answered as closed.
    """

    def __init__(self, raw: Any = None) -> None:  # noqa: ANN401 - the library has no types
        self._raw = raw
        self._idle = threading.Condition()
        self._running = 0
        self._closing = raw is None
        self._counts: collections.Counter[str] = collections.Counter()
        self._complaints = Complaints(_logger)

    @property
    def closed(self) -> bool:
        """True once ``close`` was called."""
        return self._closing

    def call(self, method: str, *args: Any) -> Any:  # noqa: ANN401 - as the library answers
        """Call a method of the library. None if the client is closed."""
        with self._idle:
            if self._closing:
                return None
            self._running += 1
            self._counts[f"calls_{method}"] += 1
            self._counts["master_calls"] += _ROUND_TRIPS.get(method, 0)
        try:
            return getattr(self._raw, method)(*args)
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def codes(self, method: str, keys: Sequence[str], *args: Any) -> list[int]:  # noqa: ANN401
        """Call a method that answers one number per key, and make sure that it did.

        No keys: no call. A closed client answers RPC_FAIL for each.
        """
        if not keys:
            return []
        answer = self.call(method, list(keys), *args)
        self.count(f"keys_{method}", len(keys))
        if answer is None:
            return [codes.RPC_FAIL] * len(keys)
        if not isinstance(answer, list) or len(answer) != len(keys):
            answer = [codes.NO_ANSWER] * len(keys)
        for code in sorted(set(answer)):
            if code < 0 and codes.failure(code) in {Outcome.FAILED, Outcome.DOWN}:
                level = logging.ERROR if code in codes.BUGS else logging.WARNING
                self._complaints.say(f"{method} {code}", f"Mooncake: {method}: {code}", level)
        return answer

    def transfer(self, method: str, pieces: Sequence[RangeIO]) -> list[int]:
        """Move pieces in one call. One number per piece: bytes moved, or negative."""
        return self.codes(
            method,
            [piece.key for piece in pieces],
            [list(piece.addresses) for piece in pieces],
            [list(piece.sizes) for piece in pieces],
            [list(piece.offsets) for piece in pieces],
        )

    def register(self, address: int, size: int) -> bool:
        """Make memory of this process known to the transfer engine."""
        if address <= 0 or size <= 0:
            return False
        code = self.call("register_buffer", address, size)
        if code not in {0, None}:
            self.complain("register", f"Mooncake refused {size} bytes of memory: {code}")
        return bool(code == 0)

    def complain(self, kind: str, text: str) -> None:
        """Log a warning, but not all the time."""
        self._complaints.say(kind, text)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        with self._idle:
            self._counts[name] += number

    def note(self, kind: str, answer: list[Outcome]) -> list[Outcome]:
        """Count outcomes, and return them."""
        with self._idle:
            for outcome in answer:
                self._counts[f"outcomes_{kind}_{outcome.value}"] += 1
        return answer

    def counters(self) -> dict[str, float]:
        """Calls and keys by method, outcomes by kind, bytes, and ``master_calls``."""
        with self._idle:
            return dict(self._counts)

    def hostname(self) -> str:
        """How other clients know this one's segment."""
        return str(self.call("get_hostname") or "")

    def close(self, open_puts: Sequence[str], open_gets: Sequence[str]) -> bool:
        """Wait for running calls, end what is open, disconnect. Bounded; idempotent.

        Returns:
            False if the master did not answer and the client was therefore left as it is.
        """
        with self._idle:
            if self._closing:
                return True
            self._closing = True
            drained = self._idle.wait_for(lambda: not self._running, _DRAIN_S)
        if not drained or not self._is_alive():
            _ABANDONED.append(self._raw)
            return False
        if open_puts:
            self._raw.batch_put_session_revoke(list(open_puts))
        if open_gets:
            self._raw.batch_get_session_end(list(open_gets))
        self._raw.close()
        return True

    def _is_alive(self) -> bool:
        answers: list[int] = []

        def ask() -> None:
            answers.extend(self._raw.batch_is_exist([SENTINEL]))

        asker = threading.Thread(target=ask, name="mooncake-alive", daemon=True)
        asker.start()
        asker.join(_ALIVE_S)
        return bool(answers) and answers[0] >= 0


def parts(ranges: Sequence[RangeIO], chosen: Sequence[int]) -> list[list[int]]:
    """Cut a batch of whole objects into calls that the library can carry out."""
    answer: list[list[int]] = []
    room = 0
    for i in chosen:
        count = len(ranges[i].sizes)
        if count > room or not answer:
            answer.append([])
            room = _MAX_BUFFERS
        answer[-1].append(i)
        room -= count
    return answer
