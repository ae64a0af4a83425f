"""What every test runs under.

Hypothesis has no deadlines (a busy machine is no failure) and no luck in CI. A run that leaves
processes or threads behind fails.
"""

import os
import threading
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvferry",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvferry")

#: Helpers of Python itself that live as long as their process.
_LASTING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _leaked(process: psutil.Process) -> str:
    """Describe a process that still runs; empty if it is gone or may stay."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
    if any(name in command for name in _LASTING):
        return ""
    return f"process {process.pid}: {command[:200]}"


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the run if its tests leave processes, or threads that would keep it from ending."""
    processes, threads = _children(), set(threading.enumerate())
    yield
    left = [text for text in map(_leaked, _children() - processes) if text]
    left += [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread not in threads
        and not thread.daemon
        # The timer of pytest-timeout that watches this very code.
        and not thread.name.startswith("pytest_timeout")
    ]
    assert not left, f"left behind: {left}"
