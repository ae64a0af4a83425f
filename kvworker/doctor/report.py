"""What a check says, and what it may look at."""

import enum
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Verdict(enum.Enum):
    """How a check came out, by what it means for serving."""

    OK = "ok"
    #: It will serve, but slower or less safely than it could.
    WARN = "warn"
    #: It will not serve.
    FAIL = "fail"
    #: Could not be looked at, because an earlier check failed.
    SKIP = "skip"


class Finding(NamedTuple):
    """The outcome of one check."""

    name: str
    verdict: Verdict
    #: What is there.
    found: str
    #: What to do; empty if there is nothing to do.
    remedy: str = ""


def ok(name: str, found: str) -> Finding:
    """All is as it should be."""
    return Finding(name, Verdict.OK, found)


def warn(name: str, found: str, remedy: str) -> Finding:
    """It could be better."""
    return Finding(name, Verdict.WARN, found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    """It will not work."""
    return Finding(name, Verdict.FAIL, found, remedy)


class Surroundings:
    """The machine as the checks see it. Tests put another one in its place."""

    def __init__(
        self, environ: Mapping[str, str] = os.environ, root: Path = Path("/"), device: str = ""
    ) -> None:
        self.environ = environ
        self.device = device
        self._root = root

    def path(self, absolute: str) -> Path:
        """Where a file of the machine is."""
        return self._root / absolute.lstrip("/")

    def read(self, absolute: str) -> str:
        """Text of a file; empty if it cannot be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def free_bytes(self, absolute: str) -> int:
        """Free bytes of the file system there; 0 if there is none."""
        try:
            info = os.statvfs(self.path(absolute))
        except OSError:
            return 0
        return info.f_bavail * info.f_frsize
