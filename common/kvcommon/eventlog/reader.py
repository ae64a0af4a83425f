"""Reads an event log that may be torn, damaged or hostile.

Reading executes nothing of the file, holds one window of it in memory, and does work linear in its
size. A torn last record is normal. Anything else that is not a record is named with its offset and
skipped: the reader looks for the next place at which a whole frame stands.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from kvcommon.errors import LogFormatError
from kvcommon.eventlog.compress import SUFFIX, unpack
from kvcommon.eventlog.format import (
    FORMAT_VERSION,
    FRAME,
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREAMBLE,
    Damage,
    Dropped,
    LogHeader,
    RawRecord,
    checksum,
)

_CHUNK_BYTES: Final = 1 << 20
#: Bytes that may be checksummed while looking for good frames behind damage, per file: a hostile
#: file can make every offset look like a frame.
_SEARCH_BUDGET_BYTES: Final = 64 << 20
#: How a frame begins: a length below 16 MiB, a checksum, and an array or map of up to 15 items.
_CANDIDATE: Final = re.compile(rb"(?s)(?=...\x00....[\x80-\x9f])")
_CANDIDATE_BYTES: Final = FRAME.size + 1
#: At most so many damaged places are kept by name; the rest is only counted.
_MAX_NAMED: Final = 1000

_header_decoder = msgspec.msgpack.Decoder(LogHeader)
_record_decoder = msgspec.msgpack.Decoder(RawRecord)
_dropped_decoder = msgspec.msgpack.Decoder(Dropped)
_DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class LogReader:
    """One file of a log. Iterating reads it from the start; ``torn``, ``damage``, ``dropped`` and
    ``num_damaged`` tell about the newest iteration, as far as it went."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            LogFormatError: not an event log, an unknown version, or a broken header.
            OSError: the file cannot be read.
        """
        self.path = path
        #: The last record is not complete.
        self.torn = False
        #: Skipped places, at most 1000 of them.
        self.damage: list[Damage] = []
        self.num_damaged = 0
        #: Where the writer says that records are missing.
        self.dropped: list[Dropped] = []
        with _open(path) as file:
            self.header, self._start = _read_header(file, path)

    def __iter__(self) -> Iterator[RawRecord]:
        """Yield the file's records in order."""
        self.torn = False
        self.damage = []
        self.num_damaged = 0
        self.dropped = []
        with _open(self.path) as file:
            for offset, payload in self._frames(file):
                try:
                    if payload[0] >= 0x90:  # a msgpack array: a record
                        yield _record_decoder.decode(payload)
                    else:
                        self.dropped.append(_dropped_decoder.decode(payload))
                        del self.dropped[:-_MAX_NAMED]
                except _DECODE_ERRORS as error:  # noqa: PERF203 - record by record
                    self._damaged(offset, FRAME.size + len(payload), f"not a record: {error}")

    def _frames(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield offset and payload of each good frame."""
        size = os.fstat(file.fileno()).st_size
        budget = _SEARCH_BUDGET_BYTES
        base = self._start
        file.seek(base)
        window = file.read(_CHUNK_BYTES)
        at = 0
        unpack, header_bytes = FRAME.unpack_from, FRAME.size
        while True:
            if len(window) - at < header_bytes:
                base, window, at = base + at, window[at:] + file.read(_CHUNK_BYTES), 0
            why = ""
            if len(window) < header_bytes:
                if not window:
                    return
                why = "torn"
            else:
                length, crc = unpack(window, at)
                end = at + header_bytes + length
                if not 0 < length <= MAX_PAYLOAD_BYTES:
                    why = f"impossible length {length}"
                elif base + end > size:
                    why = "torn"
                else:
                    if end > len(window):
                        more = file.read(max(_CHUNK_BYTES, end - len(window)))
                        base, window, at = base + at, window[at:] + more, 0
                        end = header_bytes + length
                    payload = window[at + header_bytes : end]
                    if checksum(payload, base + at) == crc:
                        yield base + at, payload
                        at = end
                        continue
                    why = "wrong checksum"
            offset = base + at
            found, budget = _find_frame(file, offset + 1, size, budget)
            if found == size and why == "torn":
                self.torn = True
                return
            self._damaged(offset, found - offset, "incomplete" if why == "torn" else why)
            base, at = found, 0
            file.seek(found)
            window = file.read(_CHUNK_BYTES)

    def _damaged(self, offset: int, num_bytes: int, reason: str) -> None:
        self.num_damaged += 1
        if len(self.damage) < _MAX_NAMED:
            self.damage.append(Damage(offset=offset, num_bytes=num_bytes, reason=reason))


def read_log(path: Path) -> LogReader:
    """Open one file of a log for reading.

    Raises:
        LogFormatError: not an event log, an unknown version, or a broken header.
        OSError: the file cannot be read.
    """
    return LogReader(path)


def _open(path: Path) -> BinaryIO:
    # Not blocking, so that a FIFO in a log directory cannot hang the reader.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise LogFormatError(f"{path}: not a regular file")
    file = open(fd, "rb", buffering=0)  # noqa: PTH123, SIM115 - owns the descriptor
    return unpack(path, file) if path.suffix == SUFFIX else file


def _read_header(file: BinaryIO, path: Path) -> tuple[LogHeader, int]:
    """Return the header and the offset of the first record."""
    start = len(PREAMBLE)
    head = file.read(start + FRAME.size)
    if not head.startswith(MAGIC) or len(head) < start:
        raise LogFormatError(f"{path}: not an event log of kvferry")
    version = int.from_bytes(head[len(MAGIC) : start], "little")
    if version != FORMAT_VERSION:
        raise LogFormatError(f"{path}: format {version}; this reader knows {FORMAT_VERSION}")
    if len(head) < start + FRAME.size:
        raise LogFormatError(f"{path}: the header is torn")
    length, crc = FRAME.unpack_from(head, start)
    if not 0 < length <= MAX_HEADER_BYTES:
        raise LogFormatError(f"{path}: the header is broken (impossible length {length})")
    payload = file.read(length)
    if len(payload) < length or checksum(payload, start) != crc:
        raise LogFormatError(f"{path}: the header is torn or damaged")
    try:
        header = _header_decoder.decode(payload)
    except _DECODE_ERRORS as error:
        raise LogFormatError(f"{path}: the header is broken: {error}") from None
    return header, start + FRAME.size + length


def _find_frame(file: BinaryIO, start: int, size: int, budget: int) -> tuple[int, int]:
    """Find the next good frame.

    Returns:
        Its offset, or ``size`` if there is none within the budget; and the budget that is left.
    """
    fd = file.fileno()
    at = start
    while at + _CANDIDATE_BYTES <= size:
        chunk = os.pread(fd, _CHUNK_BYTES, at)
        for match in _CANDIDATE.finditer(chunk):
            offset = at + match.start()
            length, crc = FRAME.unpack_from(chunk, match.start())
            if length == 0 or offset + FRAME.size + length > size:
                continue
            budget -= length
            if budget < 0:
                return size, 0
            payload = os.pread(fd, length, offset + FRAME.size)
            if len(payload) == length and checksum(payload, offset) == crc:
                return offset, budget
        if len(chunk) < _CANDIDATE_BYTES:
            break
        at += len(chunk) - _CANDIDATE_BYTES + 1
    return size, budget
