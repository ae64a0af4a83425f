"""``kvworker`` with a fault in its transfer code: ``python broken_daemon.py FAULT serve ...``."""

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from kvworker.cli import main
from kvworker.transfer.find import Finder
from kvworker.transfer.load import Loader
from kvworker.transfer.save import Saver


def swapped(real: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Blocks are taken in the wrong order."""

    def call(self: Any, job: Any) -> Any:
        command = msgspec.structs.replace(job.command, block_ids=job.command.block_ids[::-1])
        job.command = command
        return real(self, job)

    return call


def short(real: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The last layer is not moved, and said to be."""

    def call(self: Any, job: Any) -> Any:
        command = job.command
        job.command = msgspec.structs.replace(command, end_layer=command.end_layer - 1)
        answer = real(self, job)
        job.command = command
        return answer

    return call


def scribbling(real: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A block that no job names is written too."""

    def call(self: Any, job: Any) -> Any:
        answer = real(self, job)
        span = job.memory.pieces(job.command.group).span(0, 1)
        for address, size in zip(span.addresses(1), span.sizes, strict=True):
            ctypes.memset(address, 7, size)
        return answer

    return call


def forgetting(real: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Objects are taken away again as soon as they are published."""

    def call(self: Any, job: Any) -> Any:
        answer = real(self, job)
        self._store.remove_prefix("kvf1-")
        return answer

    return call


FAULTS: dict[str, tuple[type, str, Callable[[Any], Any]]] = {
    "saves-swapped": (Saver, "write", swapped),
    "loads-swapped": (Loader, "load", swapped),
    "loads-short": (Loader, "load", short),
    "loads-scribble": (Loader, "load", scribbling),
    "loads-lose-objects": (Loader, "close", forgetting),
    "lookups-hang": (Finder, "find", lambda _real: lambda _self, _job: threading.Event().wait()),
}

if __name__ == "__main__":
    owner, name, break_it = FAULTS[sys.argv.pop(1)]
    setattr(owner, name, break_it(getattr(owner, name)))
    main()
