"""Asking for the event logs that are kept in memory, from another process."""

import fcntl
import time
from pathlib import Path
from typing import Final

from kvcommon.errors import ConfigError
from kvcommon.eventlog import ask_for_dumps, split_file_name

_LOOK_S: Final = 0.05
#: Behind the first new file, others (of engines) are waited for so long.
_MORE_S: Final = 0.5


def write_logs(directory: str, timeout_s: float) -> list[Path]:
    """Ask every log of a directory that is kept in memory to be written, and wait.

    Args:
        directory: of the logs; empty: the daemon keeps none.
        timeout_s: how long to wait for the first file.

    Returns:
        The new files, complete.

    Raises:
        ConfigError: no directory, one that cannot be written, or nothing comes, or not all of it.
    """
    if not directory:
        raise ConfigError("the daemon keeps no event log: start it with --event-log")
    folder = Path(directory)
    before = _logs(folder)
    try:
        ask_for_dumps(folder)
    except OSError as error:
        raise ConfigError(f"event log {directory}: {error.strerror}") from None
    deadline = time.monotonic() + timeout_s
    while not _logs(folder) - before:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"no log was written to {directory} within {timeout_s:g} s: those of mode `on` are "
                "complete already, and a ring without events has nothing to write"
            )
        time.sleep(_LOOK_S)
    time.sleep(_MORE_S)
    found = sorted(_logs(folder) - before)
    deadline += _MORE_S
    while unfinished := [path for path in found if _is_being_written(path)]:
        if time.monotonic() > deadline:
            names = ", ".join(path.name for path in unfinished)
            raise ConfigError(f"not all is written within {timeout_s:g} s, only begun: {names}")
        time.sleep(_LOOK_S)
    return found


def _is_being_written(path: Path) -> bool:
    """Whoever writes a ring holds a lock on the file until it is complete, or dies."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # Removed since, as older dumps are.
        return False
    return False


def _logs(folder: Path) -> set[Path]:
    if not folder.is_dir():
        return set()
    return {path for path in folder.iterdir() if split_file_name(path.name)}
