"""How other threads hand events to the thread that owns the sockets.

``post`` may be called from any thread and never blocks; ``take`` belongs to the owner, who polls
``fileno`` beside its sockets.
"""

import contextlib
import os
from collections import deque

from kvworker.core.events import WorkerEvent


class Inbox:
    """An unbounded queue of small events with a descriptor that is readable while it is not empty.

    Unbounded because every event answers one command or is one of a few: the core bounds them.
    """

    def __init__(self) -> None:
        self._events: deque[WorkerEvent] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._fd

    def post(self, event: WorkerEvent) -> None:
        """Add an event and wake the owner. Any thread; after ``close`` it is dropped."""
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        """Wake the owner without an event. Any thread; safe in a signal handler."""
        fd = self._fd
        if fd >= 0:
            # A full counter means that it is awake already.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(fd, 1)

    def take(self) -> list[WorkerEvent]:
        """Remove and return what was posted, oldest first."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        events: list[WorkerEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Give the descriptor back, once no other thread posts any more. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
