"""A store that may be opened after the daemon has begun to serve.

Starting in any order must work: a daemon that comes before its store serves at once, and every
key is DOWN until the store is there. Waiting for one that cannot be reached goes on for ever;
any other ``StoreError`` or ``ConfigError`` is a misconfiguration, and ends the daemon.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvcommon.errors import ConfigError, StoreError, StoreUnreachable
from kvcommon.messages import StoreState
from kvworker.outcome import Outcome
from kvworker.stores.base import LocalObject, RangeIO, Store

logger = logging.getLogger("kvferry.worker")

#: The same complaint is logged once in so long.
_REPEAT_S = 60.0


class OpeningStore(Store):
    """Wraps a store that is opened by a thread of its own, again and again until it works."""

    def __init__(
        self, inner: Store, *, retry_s: Sequence[float], failed: Callable[[], None]
    ) -> None:
        """Wrap a store that is not open yet.

        Args:
            inner: The store.
            retry_s: How long to wait after the first, second, … failed attempt; the last entry
                counts for all further ones.
            failed: Called once, by the opening thread, when ``error`` is set.
        """
        self.name = inner.name
        #: Why it will never be opened; None while it may be.
        self.error: StoreError | ConfigError | None = None
        self._last: StoreUnreachable | None = None
        self._inner = inner
        self._retry_s = tuple(retry_s)
        self._failed = failed
        self._lock = threading.Lock()
        self._is_open = False
        self._once = False
        self._closing = threading.Event()
        self._settled = threading.Event()
        #: Memory registered before the store was open.
        self._memory: dict[int, tuple[int, str]] = {}
        self._thread = threading.Thread(target=self._run, name="store-open", daemon=True)

    @property
    def is_open(self) -> bool:
        """It has been opened and not closed."""
        return self._is_open

    @property
    def whole_puts(self) -> bool:  # type: ignore[override]
        """As the inner store says, once it is open."""
        return self._is_open and self._inner.whole_puts

    def open(self, *, once: bool = False) -> None:
        """Begin opening; returns at once. Raises nothing: see ``wait`` and ``error``.

        ``once``: a store that is not there is not tried again.
        """
        self._once = once
        self._thread.start()

    def wait(self, timeout_s: float, *, required: bool = False) -> bool:
        """Wait until the first attempt has ended. Returns whether the store is open.

        Raises:
            StoreError, ConfigError: it will never be open, or is not although ``required``.
        """
        self._settled.wait(timeout_s)
        if self.error is not None:
            raise self.error
        if required and not self._is_open:
            raise self._last or StoreUnreachable(f"no answer within {timeout_s:.0f} s")
        return self._is_open

    def _run(self) -> None:
        attempt = 0
        said, said_at = "", 0.0
        while not self._closing.is_set():
            try:
                self._inner.open()
            except StoreUnreachable as error:
                self._last = error
                if self._once:
                    self._settled.set()
                    return
                delay_s = self._retry_s[min(attempt, len(self._retry_s) - 1)]
                now = time.monotonic()
                if str(error) != said or now - said_at >= _REPEAT_S:
                    said, said_at = str(error), now
                    logger.warning(
                        "the store is not there yet, trying again after %.0f s, and on: %s",
                        delay_s,
                        error,
                    )
            except (StoreError, ConfigError) as error:
                self._give_up(error)
                return
            except Exception as error:
                # Else the daemon would serve for ever without a store, and without a word.
                logger.exception("a fault while the store was being opened; please report it")
                self._give_up(StoreError(f"the store cannot be opened: {error!r}"))
                return
            else:
                self._opened()
                self._settled.set()
                return
            attempt += 1
            self._settled.set()
            self._closing.wait(delay_s)

    def _give_up(self, error: StoreError | ConfigError) -> None:
        self.error = error
        self._settled.set()
        self._failed()

    def _opened(self) -> None:
        with self._lock:
            if self._closing.is_set():
                self._inner.close()
                return
            for address, (size, location) in self._memory.items():
                if not self._inner.register(address, size, location):
                    logger.error(
                        "the store cannot use %d bytes that were attached before it was there: "
                        "saves and loads of that engine fail until it attaches again",
                        size,
                    )
            self._memory.clear()
            self._is_open = True
        logger.info("the store %s is open", self.name)

    def close(self) -> None:
        """Stop trying; close the store if it is open."""
        with self._lock:
            self._closing.set()
            is_open, self._is_open = self._is_open, False
        if is_open:
            self._inner.close()

    @property
    def device_memory(self) -> bool:  # type: ignore[override]
        """As the inner store says."""
        return self._inner.device_memory

    def register(self, address: int, size: int, location: str = "cpu") -> bool:
        """At once if the store is open, else as soon as it is."""
        with self._lock:
            if not self._is_open:
                self._memory[address] = size, location
                return True
        return self._inner.register(address, size, location)

    def unregister(self, address: int) -> None:
        """Undo ``register``, whenever it took or takes effect."""
        with self._lock:
            if not self._is_open:
                self._memory.pop(address, None)
                return
        self._inner.unregister(address)

    def find(self, keys: Sequence[str]) -> list[Outcome]:
        """DOWN before the store is open."""
        return self._inner.find(keys) if self._is_open else _down(keys)

    def is_local(self, keys: Sequence[str]) -> bool:
        """Nothing is, before the store is open."""
        return self._is_open and self._inner.is_local(keys)

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        """DOWN before the store is open."""
        return self._inner.put_start(keys, sizes) if self._is_open else _down(keys)

    def put_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """DOWN before the store is open."""
        return self._inner.put_ranges(ranges) if self._is_open else _down(ranges)

    def put_end(self, keys: Sequence[str]) -> list[Outcome]:
        """DOWN before the store is open."""
        return self._inner.put_end(keys) if self._is_open else _down(keys)

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        """DOWN before the store is open."""
        return self._inner.put_revoke(keys) if self._is_open else _down(keys)

    def put_objects(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """DOWN before the store is open."""
        return self._inner.put_objects(ranges) if self._is_open else _down(ranges)

    def get_start(self, keys: Sequence[str], sizes: Sequence[int] | None = None) -> list[Outcome]:
        """DOWN before the store is open."""
        return self._inner.get_start(keys, sizes) if self._is_open else _down(keys)

    def local(self, key: str) -> LocalObject | None:
        """Nothing is, before the store is open."""
        return self._inner.local(key) if self._is_open else None

    def get_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        """DOWN before the store is open."""
        return self._inner.get_ranges(ranges) if self._is_open else _down(ranges)

    def get_end(self, keys: Sequence[str]) -> None:
        """Nothing is open before the store is."""
        if self._is_open:
            self._inner.get_end(keys)

    def remove_prefix(self, prefix: str) -> int:
        """Nothing is removed before the store is open."""
        return self._inner.remove_prefix(prefix) if self._is_open else 0

    def probe(self) -> StoreState:
        """DOWN before the store is open."""
        return self._inner.probe() if self._is_open else StoreState.DOWN

    def metrics(self) -> dict[str, float]:
        """The inner store's, once it is open."""
        return self._inner.metrics() if self._is_open else {}


def _down(keys: Sequence[object]) -> list[Outcome]:
    return [Outcome.DOWN] * len(keys)
