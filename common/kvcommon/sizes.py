"""Sizes as people write them. The one parser of the project, for options and configuration files.

Units are taken at their word: ``KB MB GB TB`` (and ``K M G T``) are decimal, ``KiB MiB GiB TiB``
(and ``Ki Mi Gi Ti``) are binary. Mooncake's own tools read ``4GB`` as 4 * 1024**3 bytes; here it is
4 * 1000**3, so write ``4GiB`` where the binary size is meant. Case and spaces do not matter.
"""

import math
import re

from kvcommon.errors import ConfigError

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
#: No size may reach this; it also bounds what a careless ``1e300`` can do.
_LIMIT = 1 << 63


def parse_size(text: str | float) -> int:
    """Read a size.

    Args:
        text: ``"4 GB"``, ``"1.5GiB"``, ``"512m"``, ``"4096"``, or a plain number of bytes.

    Returns:
        Bytes, fractions dropped.

    Raises:
        ConfigError: not a size, negative, not finite, or 2**63 and more.
    """
    if isinstance(text, str):
        return _parse_text(text)
    if isinstance(text, bool) or not isinstance(text, int | float):
        raise ConfigError(f"{text!r} is not a size: write a number of bytes or, say, '4GiB'")
    if not math.isfinite(text) or not 0 <= text < _LIMIT:
        raise ConfigError(f"{text!r} is not a size: it must be from 0 to 2**63 - 1 bytes")
    return int(text)


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text)
    # "4i" and "4ib" have a binary mark without a unit.
    if match is None or (match[3] and not match[2]):
        raise ConfigError(
            f"{text!r} is not a size: write a number and one of B, KB, MB, GB, TB (powers of "
            "1000) or KiB, MiB, GiB, TiB (powers of 1024), for example '4GiB'"
        )
    number, unit, binary = match[1], match[2].lower(), bool(match[3])
    factor = (1024 if binary else 1000) ** _UNITS[unit]
    # Whole numbers stay whole: a float cannot hold every 63-bit size.
    size = int(number) * factor if number.isdecimal() else int(float(number) * factor)
    if size >= _LIMIT:
        raise ConfigError(f"{text!r} is too large: sizes end at 2**63 - 1 bytes")
    return size
