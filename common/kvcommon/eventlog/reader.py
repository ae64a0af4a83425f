"""Reads an event log that may be torn, damaged or hostile.

Reading executes nothing of the file, holds one window of it in memory, and does work linear in its
size. A torn last record is normal. Anything else that is not a record is named with its offset and
skipped: the reader looks for the next place at which a whole frame stands.
"""

import errno
import os
import re
import stat
import zlib
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
    MAX_PART,
    MAX_PAYLOAD_BYTES,
    NAME_PATTERN,
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
#: Payloads that begin with this or more are arrays: records.
_ARRAY: Final = 0x90
_MORE: Final = "more"

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
        for offset, payloads in self.batches():
            at = offset
            for payload in payloads:
                try:
                    if payload[0] >= _ARRAY:
                        yield _record_decoder.decode(payload)
                    else:
                        self._note_dropped(payload)
                except _DECODE_ERRORS as error:  # record by record
                    self._damaged(at, FRAME.size + len(payload), f"not a record: {error}")
                at += FRAME.size + len(payload)

    def batches(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield good frames that follow each other: the offset of the first, and all payloads.

        For who wants to look at many records without decoding them: a payload that begins with a
        byte of at least 0x90 is a record (``RawRecord``), others are notes (``Dropped``). Damage
        is found and noted as when iterating.
        """
        self.torn = False
        self.damage = []
        self.num_damaged = 0
        self.dropped = []
        with _open(self.path) as file:
            yield from self._frames(file)

    def _frames(self, file: BinaryIO) -> Iterator[tuple[int, list[bytes]]]:
        size = os.fstat(file.fileno()).st_size
        budget = _SEARCH_BUDGET_BYTES
        base = self._start
        file.seek(base)
        window, wanted = b"", _CHUNK_BYTES
        while True:
            chunk = file.read(wanted)
            if not chunk:
                # The end; or the file has shrunk under our hands.
                size = min(size, base + len(window))
            window += chunk
            payloads, at, why = _take(window, base)
            if payloads:
                yield base, payloads
            base, window = base + at, window[at:]
            if not window and base >= size:
                return
            if why == _MORE:
                # The frame is not whole in the window: is it in the file?
                wanted = _frame_bytes(window)
                if base + wanted <= size:
                    wanted = max(_CHUNK_BYTES, wanted - len(window))
                    continue
                why = "torn"
            found, budget = _find_frame(file, base + 1, size, budget)
            if found == size and why == "torn":
                self.torn = True
                return
            self._damaged(base, found - base, "incomplete" if why == "torn" else why)
            base, window, wanted = found, b"", _CHUNK_BYTES
            file.seek(found)

    def _note_dropped(self, payload: bytes) -> None:
        self.dropped.append(_dropped_decoder.decode(payload))
        del self.dropped[:-_MAX_NAMED]

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
    # The name goes to terminals, into causes and into file names.
    if NAME_PATTERN.fullmatch(header.name) is None:
        raise LogFormatError(f"{path}: the header is broken: not a name: {header.name[:200]!r}")
    if not 0 <= header.part <= MAX_PART:
        raise LogFormatError(f"{path}: the header is broken: no part has number {header.part}")
    return header, start + FRAME.size + length


def _take(window: bytes, base: int) -> tuple[list[bytes], int, str]:
    """Take the good frames from the start of a window; ``base`` is its offset in the file.

    Returns:
        Payloads, where the first frame that is not taken begins, and why it is not: ``_MORE`` if
        it is not whole.
    """
    payloads: list[bytes] = []
    append, unpack, crc32 = payloads.append, FRAME.unpack_from, zlib.crc32
    at, last = 0, len(window)
    start = FRAME.size
    while start <= last:
        length, crc = unpack(window, at)
        end = start + length
        if not 0 < length <= MAX_PAYLOAD_BYTES:
            return payloads, at, f"impossible length {length}"
        if end > last:
            return payloads, at, _MORE
        payload = window[start:end]
        # As ``checksum``, without the call: this line is run for every record of a log.
        if crc32(payload, (base + at) & 0xFFFFFFFF) != crc:
            return payloads, at, "wrong checksum"
        append(payload)
        at, start = end, end + FRAME.size
    return payloads, at, _MORE


def _frame_bytes(window: bytes) -> int:
    """Bytes of the frame at the start of a window, as far as can be seen."""
    if len(window) < FRAME.size:
        return FRAME.size
    return FRAME.size + int(FRAME.unpack_from(window)[0])


def _find_frame(file: BinaryIO, start: int, size: int, budget: int) -> tuple[int, int]:
    """Find the next good frame.

    Returns:
        Its offset, or ``size`` if there is none within the budget; and the budget that is left.
    """
    fd = file.fileno()
    at = start
    while at + _CANDIDATE_BYTES <= size:
        # A frame has bytes that are not 0: a hole of a sparse file, however large, holds none.
        at = max(at, _next_data(fd, at, size) - _CANDIDATE_BYTES)
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


def _next_data(fd: int, at: int, size: int) -> int:
    """Where the file has bytes again, at this offset or behind it; ``size`` if nowhere."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        # A file system that knows no holes has data everywhere.
        return size if error.errno == errno.ENXIO else at
