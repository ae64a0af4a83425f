"""Bytes of synthetic KV blocks: a function of the seed and of what the block is.

Every layer of every object has bytes of its own, so a block that went to a wrong place, or came in
half, cannot look right.
"""

import hashlib
from functools import lru_cache
from typing import Final

#: What a block holds before it is computed or loaded.
POISON: Final = 0xA5


@lru_cache(maxsize=4096)
def layer_bytes(seed: int, key: str, layer: int, num_bytes: int) -> bytes:
    """Return the right bytes of one layer of one object."""
    name = f"{seed}/{key}/{layer}".encode()
    return hashlib.shake_128(name).digest(num_bytes)


def poison(num_bytes: int) -> bytes:
    """Return bytes that no layer holds."""
    return bytes([POISON]) * num_bytes
