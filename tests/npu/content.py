"""What the layer loop computes."""

import random


def layer_bytes(seed: int, block: int, layer: int, size: int) -> bytes:
    """What the kernel of a layer writes into a block."""
    return random.Random(f"{seed}/{block}/{layer}").randbytes(size)
