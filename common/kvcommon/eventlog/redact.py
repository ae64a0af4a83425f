"""Request ids as hashes, where a log may leave the house and the ids may not.

The same id gets the same hash in every process, so logs still tell one story, and whoever knows an
id finds it. Everything else stays: a fresh core that is told hashes answers with hashes.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

#: How a hashed id begins.
PREFIX: Final = "r-"
#: Stands for the text of a core's fault, which may name requests; its type is kept.
FAULT_TEXT: Final = "redacted"
_DIGEST_BYTES: Final = 8
#: Fields that hold a request id, or a tuple of them.
_ID_FIELDS: Final = frozenset({"request_id", "preempted"})


def redact_id(request_id: str) -> str:
    """Hash a request id: 16 hexadecimal digits behind ``r-``."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return PREFIX + digest


def redact_fault(fault: str) -> str:
    """Keep the type of a fault only."""
    return f"{fault.partition(':')[0]}: {FAULT_TEXT}" if fault else ""


def redact(value: Any) -> Any:  # noqa: ANN401 - any part of an event or command
    """Return the value with its request ids hashed; itself if there are none in it."""
    if isinstance(value, msgspec.Struct):
        changed = {}
        for name in value.__struct_fields__:
            old = getattr(value, name)
            new = _ids(old) if name in _ID_FIELDS else redact(old)
            if new is not old:
                changed[name] = new
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, (tuple, list)):
        return _sequence(value)
    return value


def _ids(value: str | Sequence[str]) -> Any:  # noqa: ANN401 - as it came
    return redact_id(value) if isinstance(value, str) else tuple(map(redact_id, value))


def _sequence(values: tuple[Any, ...] | list[Any]) -> tuple[Any, ...] | list[Any]:
    # Long tuples are ids and hashes: nothing to look into.
    if not values or isinstance(values[0], (int, str, bytes)):
        return values
    new = [redact(value) for value in values]
    same = all(one is other for one, other in zip(new, values, strict=True))
    if same:
        return values
    return tuple(new) if isinstance(values, tuple) else new
