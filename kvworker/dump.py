"""Asking for the event logs that are kept in memory, from another process."""

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
        The new files.

    Raises:
        ConfigError: no directory, one that cannot be written, or nothing comes.
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
    return sorted(_logs(folder) - before)


def _logs(folder: Path) -> set[Path]:
    if not folder.is_dir():
        return set()
    return {path for path in folder.iterdir() if split_file_name(path.name)}
