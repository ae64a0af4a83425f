"""A transfer thread and its queue."""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable

from kvworker.transfer.job import Job

_log = logging.getLogger(__name__)


class Lane:
    """Performs jobs one after another, in the order of ``put``."""

    def __init__(
        self,
        name: str,
        prepare: Callable[[], None],
        perform: Callable[[Job], None],
        fail: Callable[[Job, str], None],
        nice: int = 0,
    ) -> None:
        """Start the thread.

        Args:
            name: Of the thread, for people.
            prepare: Called once by the thread, before anything else.
            perform: Does a job and posts its answer.
            fail: Posts the answer of a job whose ``perform`` (or ``prepare``) raised.
            nice: By how much the thread lowers its own priority.
        """
        self.name = name
        self._prepare = prepare
        self._perform = perform
        self._fail = fail
        self._nice = nice
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # A store call may hang for half a minute: no exit of the process waits for it.
        self._thread = threading.Thread(target=self._run, name=f"kvw-{name}", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Jobs that wait, about."""
        return self._queue.qsize()

    def put(self, job: Job) -> None:
        """Queue a job. The caller bounds the backlog."""
        self._queue.put(job)

    def finish(self) -> None:
        """Let the thread end after the jobs that are queued."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; True if it ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def drain(self) -> list[Job]:
        """Take the jobs that nobody has begun; the thread still ends after its present one."""
        jobs = []
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None:
                    jobs.append(job)
        self._queue.put(None)
        return jobs

    def _run(self) -> None:
        job: Job | None = None
        prepared = False
        while True:
            try:
                if not prepared:
                    self._lower_priority()
                    self._prepare()
                    prepared = True
                if job is not None:
                    self._perform(job)
            except Exception as error:  # noqa: BLE001  (outermost loop: answer and live on)
                _log.exception("transfer thread %s: a bug of kvferry or of a library", self.name)
                if job is not None:
                    self._fail(job, f"{type(error).__name__}: {error}")
            job = self._queue.get()
            if job is None:
                return

    def _lower_priority(self) -> None:
        """Raise the niceness of this thread alone (Linux counts it per thread)."""
        if self._nice:
            thread = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, thread) + self._nice
            os.setpriority(os.PRIO_PROCESS, thread, min(nice, 19))
            self._nice = 0
