"""Watching the processes behind peers: pidfds, which a reused process id cannot fool."""

import contextlib
import logging
import os
from collections.abc import Hashable
from collections.abc import Set as AbstractSet
from typing import Protocol

logger = logging.getLogger("kvferry.worker")


class Poller(Protocol):
    """What is needed of ``zmq.Poller``."""

    def register(self, socket: int, flags: int = ...) -> None:
        """Poll a descriptor."""

    def unregister(self, socket: int) -> None:
        """Stop polling a descriptor."""


#: ``POLLIN`` of both ``select`` and ZeroMQ.
_POLLIN = 1


class ProcessWatch:
    """One pidfd per watched name, registered with a poller. Owned by the polling thread."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._fds: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}

    @property
    def names(self) -> AbstractSet[Hashable]:
        """Who is watched."""
        return self._fds.keys()

    def watch(self, name: Hashable, pid: int) -> bool:
        """Watch ``pid`` under ``name``, instead of what was watched under it before.

        Returns:
            False if that process cannot be watched: no pid given, no pidfd on this kernel, or a
            pid of another PID namespace. Its death is then seen by silence alone.
        """
        self.forget(name)
        if pid <= 0:
            return False
        try:
            fd = os.pidfd_open(pid)
        except OSError as error:
            logger.warning("cannot watch process %d (%s): its death goes unseen", pid, error)
            return False
        self._fds[name] = fd
        self._names[fd] = name
        self._poller.register(fd, _POLLIN)
        return True

    def forget(self, name: Hashable) -> None:
        """Stop watching ``name``. Idempotent."""
        fd = self._fds.pop(name, -1)
        if fd >= 0:
            del self._names[fd]
            with contextlib.suppress(KeyError):
                self._poller.unregister(fd)
            os.close(fd)

    def ended(self, fd: int) -> Hashable | None:
        """Return whose process ended if ``fd`` is one of ours and became readable, else None.

        The name is forgotten.
        """
        name = self._names.get(fd)
        if name is not None:
            self.forget(name)
        return name

    def close(self) -> None:
        """Stop watching everything."""
        for name in tuple(self._fds):
            self.forget(name)
