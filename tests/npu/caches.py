"""KV caches as vllm-ascend allocates them, small. Runs in the engine process, which has torch."""

from collections.abc import Callable
from typing import Any

import torch

#: Blocks of every cache, and layers of the table.
NUM_BLOCKS, NUM_LAYERS = 12, 3
BLOCK_SIZE = 16
_HUGE = 2 << 20

Caches = dict[str, Any]


def _raw(num_bytes: int, device: str) -> torch.Tensor:
    """As vllm-ascend allocates: 2 MiB more, cut to an aligned address."""
    whole = torch.empty(num_bytes + _HUGE, dtype=torch.int8, device=device)
    skip = -whole.data_ptr() % _HUGE or 4096
    return whole[skip : skip + num_bytes]


def _plane(device: str, *per_block: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    size = NUM_BLOCKS * dtype.itemsize
    for dim in per_block:
        size *= dim
    return _raw(size, device).view(dtype).view(NUM_BLOCKS, *per_block)


def _name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"


def gqa(device: str) -> Caches:
    """(K, V), two storages a layer."""
    return {
        _name(layer): (
            _plane(device, BLOCK_SIZE, 2, 8),
            _plane(device, BLOCK_SIZE, 2, 4),
        )
        for layer in range(NUM_LAYERS)
    }


def mla(device: str) -> Caches:
    """(latent, rope)."""
    return {
        _name(layer): (
            _plane(device, BLOCK_SIZE, 1, 32),
            _plane(device, BLOCK_SIZE, 1, 8),
        )
        for layer in range(NUM_LAYERS)
    }


def sfa(device: str) -> Caches:
    """Attention layers, and an indexer whose keys and scales share one storage."""
    caches: Caches = {
        _name(layer): (_plane(device, BLOCK_SIZE, 1, 32), _plane(device, BLOCK_SIZE, 1, 8))
        for layer in range(NUM_LAYERS - 1)
    }
    keys, scales = NUM_BLOCKS * BLOCK_SIZE * 16, NUM_BLOCKS * BLOCK_SIZE * 2
    raw = _raw(keys + scales, device)
    caches["model.layers.0.indexer"] = (
        raw[:keys].view(NUM_BLOCKS, BLOCK_SIZE, 1, 16),
        raw[keys:].view(torch.float16).view(NUM_BLOCKS, BLOCK_SIZE, 1, 1),
    )
    return caches


def strided(device: str) -> Caches:
    """Views one page apart, with padding between blocks."""
    page = BLOCK_SIZE * 48 + 256
    caches: Caches = {}
    for layer in range(NUM_LAYERS):
        raw = _raw(NUM_BLOCKS * page, device)
        wide = raw.as_strided(
            (NUM_BLOCKS, BLOCK_SIZE, 1, 32), (page, 32, 32, 1), raw.storage_offset()
        )
        narrow = raw.as_strided(
            (NUM_BLOCKS, BLOCK_SIZE, 1, 16),
            (page, 16, 16, 1),
            raw.storage_offset() + BLOCK_SIZE * 32,
        )
        caches[_name(layer)] = [wide, narrow]
    return caches


def hybrid(device: str) -> Caches:
    """Attention and state-space layers in one storage, plane after plane."""
    part = NUM_BLOCKS * BLOCK_SIZE * 16
    raw = _raw(5 * part + 512, device)
    planes = [
        raw[512 + index * part :][:part].view(NUM_BLOCKS, BLOCK_SIZE, 2, 8) for index in range(5)
    ]
    return {
        _name(0): (planes[0], planes[1]),
        "model.layers.1.mamba": [planes[2]],
        _name(2): (planes[3], planes[4]),
    }


CACHES: dict[str, Callable[[str], Caches]] = {
    maker.__name__: maker for maker in (gqa, mla, sfa, strided, hybrid)
}
