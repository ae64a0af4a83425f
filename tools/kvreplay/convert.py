"""``convert``: logs of old formats, step by step, to the present one.

A converter turns a file of one format into one of the next; older files go through several. A new
format adds one converter here, and a file of the format before it to ``tests/histories/formats``.

Format 0 is that of the prototype: no checksums, no causes, one file per log. Nobody's release wrote
it; it is here so that the way exists and is tested before it is needed.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from kvcommon.errors import LogFormatError
from kvcommon.eventlog.format import (
    FORMAT_VERSION,
    FRAME,
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    NAME_PATTERN,
    PREAMBLE,
    LogHeader,
    checksum,
    log_file_name,
)

_LENGTH_BYTES: Final = 4
_DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_encoder: Final = msgspec.msgpack.Encoder()


class _OldHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header of format 0."""

    #: ``scheduler`` or ``worker``.
    side: str
    name: str
    pid: int
    started_ns: int
    config: msgspec.Raw


class _OldRecord(msgspec.Struct, frozen=True, array_like=True):
    """Record of format 0."""

    event: msgspec.Raw
    commands: msgspec.Raw


#: Reads a file behind its preamble; yields the header's payload of the next format, then records'.
Converter = Callable[[BinaryIO], Iterator[bytes]]


def format_of(path: Path) -> int:
    """Return the format of a log file.

    Raises:
        LogFormatError: it is none of ours.
        OSError: it cannot be read.
    """
    # Nothing but a regular file ends for sure: a FIFO would be waited for.
    if not path.is_file():
        raise LogFormatError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
    with path.open("rb") as file:
        head = file.read(len(PREAMBLE))
    if not head.startswith(MAGIC) or len(head) < len(PREAMBLE):
        raise LogFormatError(f"{path}: not an event log of kvferry")
    return int.from_bytes(head[len(MAGIC) :], "little")


def convert(path: Path, out: Path) -> Path:
    """Bring a log file to the present format.

    Args:
        path: the file; it stays as it is.
        out: directory for the new file, which is named as logs are.

    Returns:
        The new file.

    Raises:
        LogFormatError: not a log, of the present format already, or of one that is not known.
        OSError: a file cannot be read or written, or the new one exists.
    """
    version = format_of(path)
    if version == FORMAT_VERSION:
        raise LogFormatError(f"{path}: is of format {version} already, which is the present one")
    if version not in CONVERTERS:
        raise LogFormatError(f"{path}: format {version}; known are {sorted(CONVERTERS)}")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    steps: list[Path] = []
    try:
        at = path
        while version != FORMAT_VERSION:
            steps.append(out / f".{path.name}.{version + 1}.part")
            _step(at, version, steps[-1])
            at = steps[-1]
            version += 1
        header = msgspec.msgpack.decode(_first_payload(at), type=LogHeader)
        if NAME_PATTERN.fullmatch(header.name) is None:
            # It would become a path.
            raise LogFormatError(f"{path}: the header is broken: not a name: {header.name[:200]!r}")
        target = out / log_file_name(header.name, header.part)
        os.link(at, target)
    except _DECODE_ERRORS as error:
        raise LogFormatError(f"{path}: the header is broken: {error}") from None
    finally:
        for step in steps:
            step.unlink(missing_ok=True)
    return target


def _step(path: Path, version: int, target: Path) -> None:
    """Convert by one format."""
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with path.open("rb") as source, open(fd, "wb") as file:  # noqa: PTH123 - owns the descriptor
        source.seek(len(PREAMBLE))
        file.write(MAGIC + (version + 1).to_bytes(2, "little"))
        for payload in CONVERTERS[version](source):
            offset = file.tell()
            file.write(FRAME.pack(len(payload), checksum(payload, offset)) + payload)


def _from_0(file: BinaryIO) -> Iterator[bytes]:
    """Format 0 → 1: frames get checksums, records numbers, causes and faults."""
    payloads = _frames_0(file)
    try:
        old = msgspec.msgpack.decode(next(payloads, b""), type=_OldHeader)
    except _DECODE_ERRORS as error:
        raise LogFormatError(f"{file.name}: the header is broken: {error}") from None
    core: Any = {"scheduler": "kvsched", "worker": "kvworker"}.get(old.side)
    if core is None:
        raise LogFormatError(f"{file.name}: no side is called {old.side!r}")
    yield _encoder.encode(
        LogHeader(
            format=1,
            core=core,
            name=old.name,
            epoch=old.pid,
            pid=old.pid,
            # The old header had one clock only, and no boot id: logs of other hosts do not fit.
            wall_ns=old.started_ns,
            mono_ns=old.started_ns,
            versions={},
            config=old.config,
            info={"converted": "0"},
        )
    )
    for seq, payload in enumerate(payloads, start=1):
        try:
            record = msgspec.msgpack.decode(payload, type=_OldRecord)
        except _DECODE_ERRORS:
            # It keeps its number, so that a reader says that one is missing.
            continue
        yield _encoder.encode((seq, "", record.event, record.commands, ""))


def _frames_0(file: BinaryIO) -> Iterator[bytes]:
    """Yield payloads up to the end, or to what cannot be a frame (nothing says where one is)."""
    limit = MAX_HEADER_BYTES
    while len(head := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
        length = int.from_bytes(head, "little")
        payload = file.read(length) if 0 < length <= limit else b""
        if len(payload) < length or not payload:
            return
        yield payload
        limit = MAX_PAYLOAD_BYTES


def _first_payload(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(len(PREAMBLE))
        length, _ = FRAME.unpack(file.read(FRAME.size))
        return file.read(int(length))


#: One converter per step: from the format of its number to the next.
CONVERTERS: Final[Mapping[int, Converter]] = {0: _from_0}
