"""Doing something at most so often per subject: log lines, refusals."""

from collections import OrderedDict

#: Subjects remembered; the longest unused is forgotten.
_MAX_SUBJECTS = 1024


class RateLimit:
    """Allows one act per subject and interval. No clock inside; memory is bounded."""

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._last_ns: OrderedDict[bytes, int] = OrderedDict()

    def allows(self, subject: bytes, now_ns: int) -> bool:
        """Say whether ``subject`` may act now, and remember that it does."""
        last_ns = self._last_ns.get(subject)
        if last_ns is not None and now_ns - last_ns < self._interval_ns:
            return False
        self._last_ns[subject] = now_ns
        self._last_ns.move_to_end(subject)
        if len(self._last_ns) > _MAX_SUBJECTS:
            self._last_ns.popitem(last=False)
        return True
