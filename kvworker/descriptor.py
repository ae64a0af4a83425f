"""The descriptor: a small file beside the socket that says who serves it.

``<device slug>.json``, written when the daemon serves and removed when it stops. A hint
for people and tools only: after a crash it may outlive the daemon, so whoever reads it checks.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from kvcommon.endpoints import device_slug
from kvcommon.errors import ConfigError


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """One serving daemon."""

    device: str
    pid: int
    #: Hexadecimal: 63 bits do not survive JSON readers that know only doubles.
    epoch: str
    endpoint: str
    version: str
    protocol: int


def descriptor_path(directory: Path, device: str, endpoint: str) -> Path:
    """Where a daemon's descriptor lies: beside its socket, else in the run directory."""
    if endpoint.startswith("ipc://"):
        return Path(endpoint[len("ipc://") :]).with_suffix(".json")
    return directory / f"{device_slug(device)}.json"


def write_descriptor(path: Path, descriptor: Descriptor) -> None:
    """Put the descriptor in place, whole or not at all.

    Raises:
        ConfigError: the directory cannot be written.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(descriptor)) + b"\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read_descriptor(path: Path) -> Descriptor | None:
    """Read a descriptor; None if there is none, or it makes no sense."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=Descriptor)
    return None
