"""Put sessions of a Mooncake client, and whole objects: the saving half of ``MooncakeStore``.

Threading: as the store's; the table has a lock of its own, which is held over no call.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvworker.outcome import Outcome
from kvworker.stores import mooncake_codes as codes
from kvworker.stores.base import RangeIO, covers, fits
from kvworker.stores.mooncake_client import MooncakeClient, parts

#: The library counts the bytes of one answer in 32 bits.
MAX_BYTES = 2**31 - 1
#: A full store evicts in the background; a second try after this time often finds room.
_FULL_RETRY_S = 0.025


class PutSessions:
    """What this client has open for writing. The methods are those of ``Store``."""

    def __init__(self, client: Callable[[], MooncakeClient], stop: threading.Event) -> None:
        """Begin with nothing open.

        Args:
            client: Gives the client of this moment: it comes with ``open``.
            stop: Set when the store is closing.
        """
        #: ``ReplicateConfig`` of every object.
        self.placement: Any = None
        self._client = client
        self._stop = stop
        self._lock = threading.Lock()
        #: Objects open for writing: size, and bytes written so far.
        self._puts: dict[str, list[int]] = {}

    def keys(self) -> list[str]:
        """All keys that are open for writing."""
        with self._lock:
            return list(self._puts)

    def clear(self) -> None:
        """Forget them."""
        with self._lock:
            self._puts.clear()

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """One master call; a second one, a moment later, for objects that found no room."""
        answer = self._unless_closed(len(keys))
        ask: list[int] = []
        with self._lock:
            for i, (key, size) in enumerate(zip(keys, sizes, strict=False)):
                if key in self._puts:
                    answer[i] = Outcome.EXISTS
                elif key and 0 < size <= MAX_BYTES:
                    self._puts[key] = [size, 0]
                    ask.append(i)
        self._start(keys, sizes, ask, answer)
        full = [i for i in ask if answer[i] is Outcome.FULL]
        if full and not self._stop.wait(_FULL_RETRY_S):
            self._start(keys, sizes, full, answer)
        with self._lock:
            for i in ask:
                if answer[i] is not Outcome.OK:
                    del self._puts[keys[i]]
        return self._client().note("put_start", answer)

    def _start(
        self, keys: Sequence[str], sizes: Sequence[int], ask: list[int], answer: list[Outcome]
    ) -> None:
        wanted = [keys[i] for i in ask]
        result = self._client().codes(
            "batch_put_session_start", wanted, [sizes[i] for i in ask], self.placement
        )
        leftover = []
        for i, code in zip(ask, result, strict=True):
            answer[i] = codes.done(code)
            if code == codes.INVALID_PARAMS:  # we say it is not open, the library says it is
                answer[i] = Outcome.EXISTS
                leftover.append(keys[i])
        self._client().codes("batch_put_session_revoke", leftover)

    def put_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """One transfer; the master is not asked."""
        with self._lock:
            sizes = [self._puts.get(piece.key, (0, 0))[0] for piece in ranges]
        good = [i for i, piece in enumerate(ranges) if fits(piece, sizes[i])]
        answer = self._unless_closed(len(ranges))
        result = self._client().transfer(
            "batch_put_from_multi_buffer_ranges", [ranges[i] for i in good]
        )
        with self._lock:
            for i, code in zip(good, result, strict=True):
                answer[i] = codes.moved(code, sum(ranges[i].sizes))
                opened = self._puts.get(ranges[i].key)
                if answer[i] is Outcome.OK and opened is not None:
                    opened[1] += code
                    self._client().count("bytes_written", code)
        return self._client().note("put_ranges", answer)

    def put_end(self, keys: Sequence[str]) -> list[Outcome]:
        """One master call. An object that misses bytes is discarded instead: FAILED."""
        answer = self._unless_closed(len(keys))
        with self._lock:
            opened = {key: self._puts.get(key) for key in keys}
        whole = [i for i, key in enumerate(keys) if _is_whole(opened[key])]
        result = self._client().codes("batch_put_session_end", [keys[i] for i in whole])
        for i, code in zip(whole, result, strict=True):
            answer[i] = codes.done(code)
        # The library keeps a session that it could not end; asking a dead master takes seconds.
        bad = [key for i, key in enumerate(keys) if answer[i] is Outcome.FAILED and opened[key]]
        self._client().codes("batch_put_session_revoke", bad)
        self._forget(keys)
        return self._client().note("put_end", answer)

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        """One master call."""
        with self._lock:
            opened = [i for i, key in enumerate(keys) if key in self._puts]
        answer = self._unless_closed(len(keys))
        result = self._client().codes("batch_put_session_revoke", [keys[i] for i in opened])
        for i, code in zip(opened, result, strict=True):
            answer[i] = codes.done(code)
        self._forget(keys)
        return self._client().note("put_revoke", answer)

    def _forget(self, keys: Sequence[str]) -> None:
        """Only after the call: until then nobody may start these keys again."""
        with self._lock:
            for key in keys:
                self._puts.pop(key, None)

    def put_objects(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """Two master calls in one, and a plain copy where the object lands in our own segment."""
        answer = self._unless_closed(len(ranges))
        good: list[int] = []
        with self._lock:
            for i, piece in enumerate(ranges):
                if piece.key in self._puts:
                    answer[i] = Outcome.EXISTS
                elif piece.key and covers(piece) and sum(piece.sizes) <= MAX_BYTES:
                    self._puts[piece.key] = [0, 0]
                    good.append(i)
        for part in parts(ranges, good):
            self._put_whole(ranges, part, answer)
        full = [i for i in good if answer[i] is Outcome.FULL]
        if full and not self._stop.wait(_FULL_RETRY_S):
            for part in parts(ranges, full):
                self._put_whole(ranges, part, answer)
        self._forget([ranges[i].key for i in good])
        return self._client().note("put_objects", answer)

    def _put_whole(self, ranges: Sequence[RangeIO], part: list[int], answer: list[Outcome]) -> None:
        result = self._client().codes(
            "batch_put_from_multi_buffers",
            [ranges[i].key for i in part],
            [list(ranges[i].addresses) for i in part],
            [list(ranges[i].sizes) for i in part],
            self.placement,
        )
        for i, code in zip(part, result, strict=True):
            answer[i] = codes.done(code)
            if code == 0:
                self._client().count("bytes_written", sum(ranges[i].sizes))

    def _unless_closed(self, count: int) -> list[Outcome]:
        outcome = Outcome.DOWN if self._client().closed else Outcome.FAILED
        return [outcome] * count


def _is_whole(opened: list[int] | None) -> bool:
    return opened is not None and opened[1] >= opened[0]
