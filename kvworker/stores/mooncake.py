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

from kvcommon.config import MooncakeConfig
from kvcommon.messages import StoreState
from kvworker.outcome import Outcome
from kvworker.stores import mooncake_codes as codes
from kvworker.stores.base import LocalObject, RangeIO, Store, fits
from kvworker.stores.mooncake_ascend import make_engine
from kvworker.stores.mooncake_client import SENTINEL, MooncakeClient
from kvworker.stores.mooncake_connect import connect, load_library, local_copies, placement
from kvworker.stores.mooncake_puts import MAX_BYTES, PutSessions
from kvworker.stores.mooncake_segment import OwnSegment, Warmer, learn_segment, object_size
from kvworker.stores.mooncake_sessions import GetSessions
from kvworker.stores.mooncake_unusable import Unusable

_logger = logging.getLogger("kvferry.worker")

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
        self._unusable = Unusable(config.store_lease_ms * 1_000_000)
        self._segment: OwnSegment | None = None
        self._warmer: Warmer | None = None
        self._stop = threading.Event()
        self._puts = PutSessions(lambda: self._client, self._stop)
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
        self._puts.placement = placement(
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
            gets = self._sessions.keys()
        if not self._client.close(self._puts.keys(), gets):
            _logger.warning("the Mooncake master does not answer; left without saying goodbye")
        self._keeper.join()
        self._puts.clear()
        with self._lock:
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
        """One master call; the answer takes a lease. What is unusable is a MISS and not leased."""
        with self._lock:
            ask = [i for i, key in enumerate(keys) if key not in self._unusable]
        answer = [Outcome.MISS] * len(keys)
        result = self._client.codes("batch_is_exist", [keys[i] for i in ask])
        for i, code in zip(ask, result, strict=True):
            answer[i] = codes.found(code)
        return self._client.note("find", answer)

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
            values["open_gets"] = len(self._sessions.keys())
            values["objects_unusable"] = len(self._unusable)
        values["open_puts"] = len(self._puts.keys())
        values["own_segment"] = float(self._segment is not None)
        return values

    # -- saving -------------------------------------------------------------------------------

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """One master call; a second one, a moment later, for objects that found no room."""
        return self._puts.put_start(keys, sizes)

    def put_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """One transfer; the master is not asked."""
        return self._puts.put_ranges(ranges)

    def put_end(self, keys: Sequence[str]) -> list[Outcome]:
        """One master call. An object that misses bytes is discarded instead: FAILED."""
        answer = self._puts.put_end(keys)
        with self._lock:
            for key, outcome in zip(keys, answer, strict=True):
                if outcome is Outcome.OK:
                    self._unusable.discard(key)
        return answer

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        """One master call."""
        return self._puts.put_revoke(keys)

    def put_objects(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """Two master calls in one, and a plain copy where the object lands in our own segment."""
        return self._puts.put_objects(ranges)

    # -- loading ------------------------------------------------------------------------------

    def get_start(self, keys: Sequence[str], sizes: Sequence[int] | None = None) -> list[Outcome]:
        """One master call for the keys that nobody has open with half of their lease left.

        With sizes another one, which ``local`` then need not make.
        """
        with self._lock:
            ask = self._sessions.acquire(keys, self._now_ns())
        failed = self._reopen(ask)
        if sizes is not None:
            self._look()
            failed.update(self._wrong(keys, sizes))
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
            looked = key not in self._sessions.unlooked()
        if not looked:
            self._look()
        with self._lock:
            return self._sessions.local(key, self._now_ns())

    def _look(self) -> None:
        """Learn where the objects of sessions that were opened lie, and how large they are."""
        with self._lock:
            unlooked = self._sessions.unlooked()
        if not unlooked:
            return
        places = self._client.call("batch_get_replica_desc", unlooked) or {}
        with self._lock:
            for key in unlooked:
                replicas = places.get(key)
                local = self._segment.locate(replicas) if self._segment is not None else None
                self._sessions.place(key, local, object_size(replicas))

    def _wrong(self, keys: Sequence[str], sizes: Sequence[int]) -> dict[str, Outcome]:
        """Those of these open objects that have another size. They are unusable from now on."""
        with self._lock:
            found = [self._sessions.size(key) for key in keys]
            wrong = {
                key: (size, is_size)
                for key, size, is_size in zip(keys, sizes, found, strict=True)
                if is_size not in {0, size}
            }
            for key in wrong:
                self._unusable.add(key, self._now_ns())
        for key, (size, is_size) in wrong.items():
            self._client.count("objects_of_wrong_size")
            self._client.complain(
                "size",
                f"the stored object {key} has {is_size} bytes instead of {size}: it counts as "
                "not stored, and is removed once nobody holds its lease",
            )
        return dict.fromkeys(wrong, Outcome.MISS)

    def get_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """One transfer; a session that ran out is opened again first, or once after failing."""
        now = self._now_ns()
        with self._lock:
            good = [
                i
                for i, piece in enumerate(ranges)
                if fits(piece, MAX_BYTES) and self._sessions.is_held(piece.key)
            ]
            stale = self._sessions.stale([ranges[i].key for i in good], now)
        failed = self._reopen(stale)
        answer = self._unless_closed(len(ranges))
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

    def _unless_closed(self, count: int) -> list[Outcome]:
        return [Outcome.DOWN if self._client.closed else Outcome.FAILED] * count

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
        """Renew open sessions, so that what ``local`` gave out stays valid; remove rubbish."""
        while not self._stop.wait(self._config.store_lease_ms / 4000):
            with self._lock:
                stale = self._sessions.stale(self._sessions.keys(), self._now_ns())
                doomed = self._unusable.due(self._now_ns())
            self._reopen(stale)
            for key in doomed:
                if not self._remove(key):
                    break

    def _remove(self, key: str) -> bool:
        """Try to remove an unusable object that nobody uses. False: the master is away."""
        code = self._client.call("remove", key, False)
        if code is None or codes.done(code) is Outcome.DOWN:
            return False
        if codes.done(code) in {Outcome.OK, Outcome.MISS}:
            self._client.count("unusable_removed")
            with self._lock:
                self._unusable.discard(key)
        return True
