"""Writes an event log: cheap, bounded, and never in the way of what it records.

One writer belongs to one thread. A record is encoded into a buffer; the buffer goes to the file in
large writes. There is no fsync and, unless closed files are to be compressed, no thread: what the
kernel has taken survives the process, and only a power failure loses it. When the file cannot be
written (full disk), the buffer is kept, records beyond it are dropped and counted, and the count
goes into the log when it can be written again. Nothing is raised into the caller after the
constructor.
"""

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvcommon.errors import ConfigError, LocalProtocolError
from kvcommon.eventlog.compress import SUFFIX, compress_later
from kvcommon.eventlog.format import (
    FRAME,
    MAX_PAYLOAD_BYTES,
    NAME_PATTERN,
    PREAMBLE,
    Dropped,
    LogHeader,
    checksum,
    log_file_name,
)
from kvcommon.eventlog.redact import redact, redact_fault

_NO_FILE: Final = -1
_FRAME_SPACE: Final = bytes(FRAME.size)
#: While the file cannot be written, it is tried again after so many dropped records at the latest.
_RETRY_AFTER: Final = 1024


class LogWriter:
    """Writes records into ``<directory>/<name>.<part>.kvlog``."""

    def __init__(
        self,
        directory: Path,
        header: LogHeader,
        *,
        max_bytes: int = 256 << 20,
        max_files: int = 8,
        buffer_bytes: int = 64 << 10,
        compressed: bool = False,
        redacted: bool = False,
        locked: bool = False,
    ) -> None:
        """Create the directory (mode 0700) if needed, and the first file (mode 0600).

        Args:
            directory: where the files go.
            header: of the log; ``part`` is counted on from it.
            max_bytes: a file that has reached this size is closed and the next one begun.
            max_files: only the newest so many files are kept; with fewer than all, the log can
                still be read but no longer replayed from its start.
            buffer_bytes: a buffer of this size is written out.
            compressed: compress closed files, in a thread of low priority.
            redacted: hash request ids (costs about as much again as recording).
            locked: hold a lock (``flock``) on a file while it is written, so that others can tell.

        Raises:
            ConfigError: the directory or the file cannot be made, or the log exists already.
        """
        if NAME_PATTERN.fullmatch(header.name) is None:
            raise LocalProtocolError(f"not a name for an event log: {header.name!r}")
        self._directory = directory
        self._header = header
        self._max_bytes = max_bytes
        self._max_files = max(1, max_files)
        self._buffer_bytes = buffer_bytes
        self._compressed = compressed
        self._redacted = redacted
        self._locked = locked
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._fd = _NO_FILE
        self._part = header.part
        #: Bytes of the present file that the kernel has taken.
        self._written = 0
        #: Records dropped since the last ``Dropped`` in the log: count, first, last.
        self._lost = (0, 0, 0)
        #: Records dropped in the writer's life.
        self.num_dropped = 0
        #: Why the last attempt to write failed; empty while all is well.
        self.error = ""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise ConfigError(
                f"event log {directory}: {error.strerror or error}; "
                "choose a directory that this process may write"
            ) from error

    @property
    def path(self) -> Path:
        """The file that is being written."""
        return self._directory / log_file_name(self._header.name, self._part)

    def record(
        self,
        seq: int,
        cause: str,
        event: msgspec.Struct,
        commands: Sequence[msgspec.Struct],
        fault: str = "",
    ) -> None:
        """Append one record. Costs an encoding; every ``buffer_bytes`` also one write."""
        if self._fd == _NO_FILE or len(self._buffer) >= 2 * self._buffer_bytes:
            self._drop(seq)
            if self.num_dropped % _RETRY_AFTER == 0:
                self.flush()
            return
        if self._lost[0]:
            self._note_lost()
        if self._redacted:
            event, commands, fault = redact(event), redact(commands), redact_fault(fault)
        if not self._put((seq, cause, event, commands, fault)):
            self._drop(seq)
        if len(self._buffer) >= self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Hand what is buffered to the kernel; begin the next file if this one is full."""
        if self._fd == _NO_FILE:
            self._reopen()
        self._drain()
        if self._fd != _NO_FILE and not self._buffer and self._written >= self._max_bytes:
            self._rotate()

    def close(self) -> None:
        """Write what is buffered and close the file. The writer is not used after this."""
        if self._fd == _NO_FILE:
            return
        if self._lost[0]:
            self._note_lost()
        self._drain()
        # Also for a child that has inherited the descriptor.
        self._lock(fcntl.LOCK_UN)
        os.close(self._fd)
        self._fd = _NO_FILE
        self._buffer.clear()

    def remove_before(self, part: int) -> None:
        """Remove the file of the part before this one, compressed or not; earlier ones are gone."""
        if part <= 0:
            return
        plain = self._directory / log_file_name(self._header.name, part - 1)
        for path in (plain, plain.with_name(plain.name + SUFFIX)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # noqa: PERF203 - two files
                self.error = str(error)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self.path, flags | os.O_NOFOLLOW, 0o600)
        self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._written = 0
        self._buffer += PREAMBLE
        self._put(msgspec.structs.replace(self._header, part=self._part))
        # At once: a file without its header could not be read while the process lives.
        self._drain()

    def _lock(self, operation: int) -> None:
        """A lock is a courtesy: a file system that has none costs nothing but that."""
        if self._locked:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, operation)

    def _reopen(self) -> None:
        try:
            self._open()
        except OSError as error:
            self.error = str(error)

    def _rotate(self) -> None:
        os.close(self._fd)
        self._fd = _NO_FILE
        if self._compressed:
            compress_later(self.path)
        self._part += 1
        self.remove_before(self._part - self._max_files + 1)
        self._reopen()

    def _drain(self) -> None:
        """Write the buffer, in part if that is all that goes; the rest stays for later."""
        while self._buffer and self._fd != _NO_FILE:
            try:
                num_bytes = os.write(self._fd, self._buffer)
            except OSError as error:
                self.error = str(error)
                return
            self._written += num_bytes
            del self._buffer[:num_bytes]
            self.error = ""

    def _put(self, payload: object) -> bool:
        """Append one frame to the buffer; False, and nothing appended, if it cannot be encoded."""
        buffer = self._buffer
        start = len(buffer)
        body = start + FRAME.size
        buffer += _FRAME_SPACE
        try:
            self._encoder.encode_into(payload, buffer, -1)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            # A bug of ours, but the caller's commands matter more than its log.
            del buffer[start:]
            self.error = f"record not encodable: {error}"
            return False
        length = len(buffer) - body
        if length > MAX_PAYLOAD_BYTES:
            del buffer[start:]
            self.error = f"record of {length} bytes is too large"
            return False
        with memoryview(buffer) as whole, whole[body:] as view:
            crc = checksum(view, self._written + start)
        FRAME.pack_into(buffer, start, length, crc)
        return True

    def _drop(self, seq: int) -> None:
        count, first, _ = self._lost
        self._lost = (count + 1, first if count else seq, seq)
        self.num_dropped += 1

    def _note_lost(self) -> None:
        count, first, last = self._lost
        self._put(Dropped(num_dropped=count, first_seq=first, last_seq=last))
        self._lost = (0, 0, 0)
