"""Closed files of a log, compressed: beside the threads that matter, and never in their way.

``<name>.<part>.kvlog`` becomes ``<name>.<part>.kvlog.gz`` by one rename, once it is complete. A
process that dies meanwhile leaves the file as it was, and perhaps a ``.part`` that nobody reads.
"""

import contextlib
import gzip
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from kvcommon.errors import LogFormatError
from kvcommon.eventlog.format import MAGIC

#: What a compressed file's name ends with.
SUFFIX: Final = ".gz"
#: No file unpacks to more: a file that claims to is not one of ours.
MAX_UNPACKED_BYTES: Final = 2 << 30
#: Nor to so many times its size (ours: about ten times), small ones aside.
MAX_RATIO: Final = 200
_SMALL_BYTES: Final = 16 << 20
_CHUNK_BYTES: Final = 1 << 20
_LEVEL: Final = 1
_NICE: Final = 10


def compress_file(path: Path) -> Path:
    """Replace a closed file by its compressed form.

    Raises:
        OSError: it cannot be read or written; the file is as it was.
    """
    target = path.with_name(path.name + SUFFIX)
    part = target.with_name(target.name + ".part")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with (
            open(fd, "wb") as raw,  # noqa: PTH123 - owns the descriptor
            gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) as packed,
            path.open("rb") as source,
        ):
            shutil.copyfileobj(source, packed, _CHUNK_BYTES)
        part.rename(target)
        path.unlink()
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return target


def compress_later(path: Path) -> threading.Thread:
    """Compress a closed file in a thread of low priority; what goes wrong leaves it as it was."""
    return in_background("kvlog-gzip", lambda: _compress(path))


def in_background(name: str, work: Callable[[], object]) -> threading.Thread:
    """Do something in a thread of its own, of low priority, which keeps no process alive."""

    def run() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def unpack(path: Path, file: BinaryIO) -> BinaryIO:
    """Unpack a compressed file into one without a name, and return that.

    A torn or damaged end is cut off: what is before it can be read.

    Args:
        path: of the file, for errors.
        file: the file, open; closed here.

    Raises:
        LogFormatError: not gzip at all, or it unpacks to what no log of ours would: more than
            ``MAX_UNPACKED_BYTES``, or ``MAX_RATIO`` times its size.
        OSError: no room.
    """
    target: BinaryIO = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - returned
    num_bytes = 0
    limit = _SMALL_BYTES + MAX_RATIO * os.fstat(file.fileno()).st_size
    limit = min(MAX_UNPACKED_BYTES, limit)
    try:
        with file, gzip.GzipFile(fileobj=file, mode="rb") as packed:
            while True:
                try:
                    chunk = packed.read1(_CHUNK_BYTES)
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    if num_bytes:
                        break
                    raise LogFormatError(f"{path}: not a compressed event log: {error}") from None
                if not chunk:
                    break
                is_ours = num_bytes > 0 or chunk.startswith(MAGIC[: len(chunk)])
                num_bytes += len(chunk)
                if num_bytes > limit:
                    break
                target.write(chunk)
                if not is_ours:
                    # Who reads it says so; the rest would say the same.
                    break
    except BaseException:
        target.close()
        raise
    if num_bytes > limit:
        target.close()
        raise LogFormatError(f"{path}: unpacks to more than {limit} bytes")
    target.seek(0)
    return target


def _compress(path: Path) -> None:
    with contextlib.suppress(OSError):
        compress_file(path)
