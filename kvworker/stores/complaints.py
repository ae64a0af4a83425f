"""Log lines about a failing store, few enough to read.

A store that is down fails thousands of calls a minute. The first failure of a kind is logged at
once, later ones are counted and told in the next line of that kind.
"""

import logging
import threading
import time
from collections.abc import Callable

#: At most one line per kind in this time.
QUIET_S = 10.0


class Complaints:
    """Rate-limited log lines by kind. Thread-safe.

    Args:
        logger: Where lines go.
        now_s: A monotonic clock.
    """

    def __init__(self, logger: logging.Logger, now_s: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._now_s = now_s
        self._lock = threading.Lock()
        #: By kind: when it was last logged, and how many were swallowed since.
        self._kinds: dict[str, tuple[float, int]] = {}

    def say(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        """Log ``text``, unless a line of this kind was logged a moment ago."""
        now = self._now_s()
        with self._lock:
            last, swallowed = self._kinds.get(kind, (float("-inf"), 0))
            if now - last < QUIET_S:
                self._kinds[kind] = (last, swallowed + 1)
                return
            self._kinds[kind] = (now, 0)
        more = f" ({swallowed} more like this before)" if swallowed else ""
        self._logger.log(level, "%s%s", text, more)
