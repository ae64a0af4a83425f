"""The bytes of an event log and the types that stand for them.

A file is the magic, a header frame, and record frames. A frame is ``u32 length``, ``u32 crc``,
``length`` bytes of msgpack, all little-endian. The checksum starts from the frame's own offset in
its file, so bytes that look like a frame but stand somewhere else are not taken for one when a
reader looks for the next good frame behind damage.
"""

import os
import re
import struct
import time
import zlib
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvcommon.errors import LocalProtocolError

#: Version of the file format. History:
#: 1  first version.
FORMAT_VERSION: Final = 1
#: First bytes of a file, before the ``u16`` format version.
MAGIC: Final = b"kvflog"
#: Magic and version together.
PREAMBLE: Final = MAGIC + struct.pack("<H", FORMAT_VERSION)
#: Length and checksum of a frame.
FRAME: Final = struct.Struct("<II")
#: No payload is larger; a writer drops (and counts) a record that would be.
MAX_PAYLOAD_BYTES: Final = (16 << 20) - 1
#: No header is larger.
MAX_HEADER_BYTES: Final = 1 << 20
#: What a log may be called: it becomes part of a file name and of every cause.
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
#: No part has a higher number: nine digits, as in file names.
MAX_PART: Final = 999_999_999
#: What file names look like: name, part.
_FILE_PATTERN: Final = re.compile(rf"({NAME_PATTERN.pattern})\.(\d{{1,9}})\.kvlog(?:\.gz)?")
_STIMULUS_PATTERN: Final = re.compile(rf"({NAME_PATTERN.pattern}):(\d{{1,18}})")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class LogHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a log is about. Every file of a log repeats it, with its own ``part``."""

    #: ``FORMAT_VERSION`` of the writer.
    format: int
    #: Whose events these are.
    core: Literal["kvsched", "kvworker"]
    #: Short and unique, for example ``kvworker-cpu-0-1a2b3c4d``; the first half of every cause.
    name: str
    #: Incarnation of the process.
    epoch: int
    pid: int
    #: Wall clock and monotonic clock at the same moment, nanoseconds: they date every record.
    wall_ns: int
    mono_ns: int
    #: Software versions by package name.
    versions: dict[str, str]
    #: The core's own configuration, encoded; a fresh core is made from it alone. No secrets.
    config: msgspec.Raw
    #: Free facts for people. Known keys: ``engine`` (scheduler side: vLLM's engine id), ``boot``
    #: (the kernel's boot id: logs with the same one share their monotonic clock), ``first_seq``
    #: (of a log that does not begin with record 1: a ring's), ``ring`` (why the ring was written).
    info: dict[str, str] = {}
    #: Number of the file within its log, from 0.
    part: int = 0


class RawRecord(msgspec.Struct, frozen=True, array_like=True):
    """One event and the core's answer, not decoded further."""

    #: Counts the events of the core from 1.
    seq: int
    #: What made the event: ``<log name>:<seq>`` of a peer's log, or nothing.
    cause: str
    event: msgspec.Raw
    commands: msgspec.Raw
    #: The core raised this instead of answering; ``commands`` is empty then.
    fault: str = ""


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """Stands in a log where records are missing because they could not be written."""

    num_dropped: int
    first_seq: int
    last_seq: int


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a file that are not a record and were skipped."""

    offset: int
    num_bytes: int
    reason: str


def make_header(
    core: Literal["kvsched", "kvworker"],
    name: str,
    epoch: int,
    config: msgspec.Struct,
    *,
    versions: dict[str, str],
    info: dict[str, str] | None = None,
) -> LogHeader:
    """Make the header of this process's log.

    Args:
        core: whose events will be recorded.
        name: unique name of the log (``NAME_PATTERN``).
        epoch: incarnation of this process.
        config: the core's configuration, from which a fresh core can be made; without secrets.
        versions: software versions by package name.
        info: facts for people; the boot id is added.

    Raises:
        LocalProtocolError: the name cannot be part of a file name.
    """
    if NAME_PATTERN.fullmatch(name) is None:
        raise LocalProtocolError(f"not a name for an event log: {name!r}")
    facts = dict(info or {})
    if _BOOT_ID.exists():
        facts.setdefault("boot", _BOOT_ID.read_text(encoding="ascii").strip())
    return LogHeader(
        format=FORMAT_VERSION,
        core=core,
        name=name,
        epoch=epoch,
        pid=os.getpid(),
        wall_ns=time.time_ns(),
        mono_ns=time.monotonic_ns(),
        versions=versions,
        config=msgspec.Raw(msgspec.msgpack.encode(config)),
        info=facts,
    )


def checksum(payload: bytes | memoryview, offset: int) -> int:
    """Checksum of the payload of the frame that begins at ``offset`` of its file."""
    return zlib.crc32(payload, offset & 0xFFFFFFFF)


def log_file_name(name: str, part: int) -> str:
    """Name the file that holds one part of a log."""
    return f"{name}.{part}.kvlog"


def split_file_name(file_name: str) -> tuple[str, int] | None:
    """Return log name and part of a file name; None if it is not a log's."""
    match = _FILE_PATTERN.fullmatch(file_name)
    return (match[1], int(match[2])) if match else None


def stimulus(name: str, seq: int) -> str:
    """Name one record of one log: what goes out as ``Envelope.cause``."""
    return f"{name}:{seq}"


def parse_stimulus(text: str) -> tuple[str, int] | None:
    """Return log name and sequence number of a cause; None if it names no record."""
    match = _STIMULUS_PATTERN.fullmatch(text)
    return (match[1], int(match[2])) if match else None
