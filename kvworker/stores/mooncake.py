"""The Mooncake store: ranged put and get sessions of ``MooncakeDistributedStore``.

Lifecycle: ``open`` connects, mounts this daemon's segment, learns how to recognise objects in it,
and starts a thread that keeps open get sessions leased; after ``StoreUnreachable`` it may be called
again. ``close`` ends all that within a bounded time, also when the master is dead or frozen.

Threading: the tables have one lock, which is held over no call that asks the master. The library
releases the interpreter lock in all calls made here except ``setup`` and ``close``.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcommon.config import MooncakeConfig
from kvcommon.messages import StoreState
from kvworker.outcome import Outcome
from kvworker.stores import mooncake_codes as codes
from kvworker.stores.base import LocalObject, RangeIO, Store, covers, fits
from kvworker.stores.mooncake_ascend import make_engine
from kvworker.stores.mooncake_client import SENTINEL, MooncakeClient, parts
from kvworker.stores.mooncake_connect import connect, load_library, local_copies, placement
from kvworker.stores.mooncake_segment import OwnSegment, Warmer, learn_segment
from kvworker.stores.mooncake_sessions import GetSessions

_logger = logging.getLogger("kvferry.worker")

#: The library counts the bytes of one answer in 32 bits.
_MAX_BYTES = 2**31 - 1
#: A full store evicts in the background; a second try after this time often finds room.
_FULL_RETRY_S = 0.025
#: ``preferred_segment`` that means "wherever the master likes".
_ANYWHERE = "any"


class MooncakeStore(Store):
    """See the module docstring.

    Args:
        config: How to reach the master, and the size of our own segment.
        save_nice: Nice value of the library's own threads; saving is nobody's hurry.
        now_ns: A monotonic clock.
        bind: Gives the calling thread the context of the daemon's accelerator, if it has one.

    Raises:
        ConfigError: the protocol needs an accelerator.
    """

    name = "mooncake"

    def __init__(
        self,
        config: MooncakeConfig,
        *,
        save_nice: int = 10,
        now_ns: Callable[[], int] = time.monotonic_ns,
        bind: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._bind = bind
        self._ascend = make_engine(config, bind)
        self.device_memory = self._ascend is not None
        self._nice = save_nice
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._client = MooncakeClient()
        self._sessions = GetSessions(config.store_lease_ms * 1_000_000)
        #: Objects open for writing: size, and bytes written so far.
        self._puts: dict[str, list[int]] = {}
        self._placement: Any = None
        self._segment: OwnSegment | None = None
        self._warmer: Warmer | None = None
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="mooncake-lease", daemon=True)

    # -- connecting ---------------------------------------------------------------------------

    def open(self) -> None:
        """Connect and mount our segment.

        Raises:
            StoreUnreachable: no master answers; trying again later may work.
            StoreError: Mooncake is missing or cannot be loaded, or the library refuses the
                configuration; the text says what to do.
        """
        library = load_library()
        config, engine = self._ascend.open(self._config) if self._ascend else (self._config, None)
        client = connect(library, config, self._nice, engine, self._bind)
        wanted = self._config.preferred_segment
        own = self._config.global_segment_size > 0
        prefer = wanted or (client.hostname() if own else "")
        self._placement = placement(
            library,
            "" if prefer == _ANYWHERE else prefer,
            same_node=self._config.prefer_alloc_in_same_node,
        )
        if own:
            probe = placement(library, client.hostname(), same_node=False)
            self._segment = learn_segment(client, probe)
            if self._segment is None:
                _logger.warning(
                    "objects in our own Mooncake segment will be read over loopback: "
                    "the segment could not be recognised"
                )
        if self._segment is not None:
            self.whole_puts = not wanted and local_copies(self._config.protocol)
            self._warmer = Warmer(self._segment, self._config.global_segment_size)
            self._warmer.start()
        self._client = client
        self._keeper.start()

    def close(self) -> None:
        """Disconnect within a bounded time. Idempotent; later calls answer DOWN."""
        self._stop.set()
        if self._client.closed:
            return
        if self._warmer is not None:
            self._warmer.stop()
        with self._lock:
            puts, gets = list(self._puts), self._sessions.keys()
        if not self._client.close(puts, gets):
            _logger.warning("the Mooncake master does not answer; left without saying goodbye")
        self._keeper.join()
        with self._lock:
            self._puts.clear()
            self._sessions.release(self._sessions.keys())

    def register(self, address: int, size: int, location: str = "cpu") -> bool:
        """Make memory known to the transfer engine (RDMA: pins it)."""
        if self._ascend is not None:
            return self._ascend.register(address, size, location)
        return location == "cpu" and self._client.register(address, size)

    def unregister(self, address: int) -> None:
        """Make memory unknown again."""
        if self._ascend is not None:
            self._ascend.unregister(address)
        else:
            self._client.call("unregister_buffer", address)

    # -- asking -------------------------------------------------------------------------------

    def find(self, keys: Sequence[str]) -> list[Outcome]:
        """One master call; the answer takes a lease."""
        return self._client.note(
            "find", [codes.found(code) for code in self._client.codes("batch_is_exist", keys)]
        )

    def is_local(self, keys: Sequence[str]) -> bool:
        """One master call, if we have a segment at all."""
        if self._segment is None or not keys:
            return False
        places = self._client.call("batch_get_replica_desc", list(keys)) or {}
        return all(self._segment.locate(places.get(key)) is not None for key in keys)

    def remove_prefix(self, prefix: str) -> int:
        """Remove what is not leased. An empty prefix removes nothing."""
        if not prefix:
            return 0
        answer = self._client.call("remove_by_regex", "^" + codes.quote(prefix)) or 0
        return max(0, int(answer))

    def probe(self) -> StoreState:
        """DOWN if the master does not answer a question about a key."""
        answer = self._client.codes("batch_is_exist", [SENTINEL])
        return StoreState.UP if answer[0] >= 0 else StoreState.DOWN

    def metrics(self) -> dict[str, float]:
        """Counters of calls, keys, bytes and outcomes, and what is open now."""
        with self._lock:
            values = self._client.counters()
            values["open_puts"] = len(self._puts)
            values["open_gets"] = len(self._sessions.keys())
        values["own_segment"] = float(self._segment is not None)
        return values

    # -- saving -------------------------------------------------------------------------------

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """One master call; a second one, a moment later, for objects that found no room."""
        answer = self._unless_closed(Outcome.FAILED, len(keys))
        ask: list[int] = []
        with self._lock:
            for i, (key, size) in enumerate(zip(keys, sizes, strict=False)):
                if key in self._puts:
                    answer[i] = Outcome.EXISTS
                elif key and 0 < size <= _MAX_BYTES:
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
        return self._client.note("put_start", answer)

    def _start(
        self, keys: Sequence[str], sizes: Sequence[int], ask: list[int], answer: list[Outcome]
    ) -> None:
        wanted = [keys[i] for i in ask]
        result = self._client.codes(
            "batch_put_session_start", wanted, [sizes[i] for i in ask], self._placement
        )
        leftover = []
        for i, code in zip(ask, result, strict=True):
            answer[i] = codes.done(code)
            if code == codes.INVALID_PARAMS:  # we say it is not open, the library says it is
                answer[i] = Outcome.EXISTS
                leftover.append(keys[i])
        self._client.codes("batch_put_session_revoke", leftover)

    def put_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """One transfer; the master is not asked."""
        with self._lock:
            sizes = [self._puts.get(piece.key, (0, 0))[0] for piece in ranges]
        good = [i for i, piece in enumerate(ranges) if fits(piece, sizes[i])]
        answer = self._unless_closed(Outcome.FAILED, len(ranges))
        result = self._client.transfer(
            "batch_put_from_multi_buffer_ranges", [ranges[i] for i in good]
        )
        with self._lock:
            for i, code in zip(good, result, strict=True):
                answer[i] = codes.moved(code, sum(ranges[i].sizes))
                opened = self._puts.get(ranges[i].key)
                if answer[i] is Outcome.OK and opened is not None:
                    opened[1] += code
                    self._client.count("bytes_written", code)
        return self._client.note("put_ranges", answer)

    def put_end(self, keys: Sequence[str]) -> list[Outcome]:
        """One master call. An object that misses bytes is discarded instead: FAILED."""
        answer = self._unless_closed(Outcome.FAILED, len(keys))
        with self._lock:
            opened = {key: self._puts.get(key) for key in keys}
        whole = [i for i, key in enumerate(keys) if _is_whole(opened[key])]
        result = self._client.codes("batch_put_session_end", [keys[i] for i in whole])
        for i, code in zip(whole, result, strict=True):
            answer[i] = codes.done(code)
        # The library keeps a session that it could not end; asking a dead master takes seconds.
        bad = [key for i, key in enumerate(keys) if answer[i] is Outcome.FAILED and opened[key]]
        self._client.codes("batch_put_session_revoke", bad)
        self._forget(keys)
        return self._client.note("put_end", answer)

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        """One master call."""
        with self._lock:
            opened = [i for i, key in enumerate(keys) if key in self._puts]
        answer = self._unless_closed(Outcome.FAILED, len(keys))
        result = self._client.codes("batch_put_session_revoke", [keys[i] for i in opened])
        for i, code in zip(opened, result, strict=True):
            answer[i] = codes.done(code)
        self._forget(keys)
        return self._client.note("put_revoke", answer)

    def _forget(self, keys: Sequence[str]) -> None:
        """Only after the call: until then nobody may start these keys again."""
        with self._lock:
            for key in keys:
                self._puts.pop(key, None)

    def put_objects(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """Two master calls in one, and a plain copy where the object lands in our own segment."""
        answer = self._unless_closed(Outcome.FAILED, len(ranges))
        good: list[int] = []
        with self._lock:
            for i, piece in enumerate(ranges):
                if piece.key in self._puts:
                    answer[i] = Outcome.EXISTS
                elif piece.key and covers(piece) and sum(piece.sizes) <= _MAX_BYTES:
                    self._puts[piece.key] = [0, 0]
                    good.append(i)
        for part in parts(ranges, good):
            self._put_whole(ranges, part, answer)
        full = [i for i in good if answer[i] is Outcome.FULL]
        if full and not self._stop.wait(_FULL_RETRY_S):
            for part in parts(ranges, full):
                self._put_whole(ranges, part, answer)
        self._forget([ranges[i].key for i in good])
        return self._client.note("put_objects", answer)

    def _put_whole(self, ranges: Sequence[RangeIO], part: list[int], answer: list[Outcome]) -> None:
        result = self._client.codes(
            "batch_put_from_multi_buffers",
            [ranges[i].key for i in part],
            [list(ranges[i].addresses) for i in part],
            [list(ranges[i].sizes) for i in part],
            self._placement,
        )
        for i, code in zip(part, result, strict=True):
            answer[i] = codes.done(code)
            if code == 0:
                self._client.count("bytes_written", sum(ranges[i].sizes))

    # -- loading ------------------------------------------------------------------------------

    def get_start(self, keys: Sequence[str]) -> list[Outcome]:
        """One master call for the keys that nobody has open with half of their lease left."""
        with self._lock:
            ask = self._sessions.acquire(keys, self._now_ns())
        failed = self._reopen(ask)
        answer = [failed.get(key, Outcome.OK) for key in keys]
        self.get_end(
            [key for key, outcome in zip(keys, answer, strict=True) if outcome is not Outcome.OK]
        )
        return self._client.note("get_start", answer)

    def local(self, key: str) -> LocalObject | None:
        """Asks the master at most once for all sessions opened since the last time."""
        if self._segment is None:
            return None
        with self._lock:
            unlooked = self._sessions.unlooked()
        if key in unlooked:
            places = self._client.call("batch_get_replica_desc", unlooked) or {}
            with self._lock:
                for each in unlooked:
                    self._sessions.place(each, self._segment.locate(places.get(each)))
        with self._lock:
            return self._sessions.local(key, self._now_ns())

    def get_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """One transfer; a session that ran out is opened again first, or once after failing."""
        now = self._now_ns()
        with self._lock:
            good = [
                i
                for i, piece in enumerate(ranges)
                if fits(piece, _MAX_BYTES) and self._sessions.is_held(piece.key)
            ]
            stale = self._sessions.stale([ranges[i].key for i in good], now)
        failed = self._reopen(stale)
        answer = self._unless_closed(Outcome.FAILED, len(ranges))
        lapsed = self._read(ranges, [i for i in good if ranges[i].key not in failed], answer)
        if lapsed:
            failed.update(self._reopen(list({ranges[i].key: None for i in lapsed})))
            self._read(ranges, [i for i in lapsed if ranges[i].key not in failed], answer)
        for i in good:
            answer[i] = failed.get(ranges[i].key, answer[i])
        return self._client.note("get_ranges", answer)

    def _read(
        self, ranges: Sequence[RangeIO], chosen: list[int], answer: list[Outcome]
    ) -> list[int]:
        """Read the chosen pieces in one call; return those whose session was not alive."""
        result = self._client.transfer(
            "batch_get_into_multi_buffer_ranges", [ranges[i] for i in chosen]
        )
        lapsed = []
        for i, code in zip(chosen, result, strict=True):
            answer[i] = codes.moved(code, sum(ranges[i].sizes))
            if code > 0:
                self._client.count("bytes_read", code)
            elif code in {codes.INVALID_PARAMS, codes.LEASE_EXPIRED}:
                lapsed.append(i)
        return lapsed

    def get_end(self, keys: Sequence[str]) -> None:
        """The master is not asked. Done under the lock, so that no new reader is cut off."""
        with self._lock:
            ended = self._sessions.release(keys)
            if ended:
                self._client.call("batch_get_session_end", ended)

    def _unless_closed(self, outcome: Outcome, count: int) -> list[Outcome]:
        return [Outcome.DOWN if self._client.closed else outcome] * count

    def _reopen(self, keys: Sequence[str]) -> dict[str, Outcome]:
        """Open sessions; return what failed. That the master is down ends no lease early."""
        asked = self._now_ns()
        failed: dict[str, Outcome] = {}
        result = self._client.codes("batch_get_session_start", keys)
        with self._lock:
            for key, code in zip(keys, result, strict=True):
                if code == 0:
                    self._sessions.opened(key, asked)
                    continue
                failed[key] = codes.done(code)
                if failed[key] is not Outcome.DOWN:
                    self._sessions.lost(key)
            orphans = [key for key in keys if not self._sessions.is_held(key)]
            if orphans:
                self._client.call("batch_get_session_end", orphans)
        return failed

    def _keep(self) -> None:
        """Renew open sessions, so that what ``local`` gave out stays valid."""
        while not self._stop.wait(self._config.store_lease_ms / 4000):
            with self._lock:
                stale = self._sessions.stale(self._sessions.keys(), self._now_ns())
            self._reopen(stale)


def _is_whole(opened: list[int] | None) -> bool:
    return opened is not None and opened[1] >= opened[0]
