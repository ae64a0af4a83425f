"""vLLM's configuration as far as the connector reads it, without a model to load."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)

NAMES = ("model.layers.0.attn", "model.layers.1.attn")
BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS, HEAD_SIZE = 16, 8, 2, 4


def vllm_config(
    options: dict[str, Any] | None = None,
    *,
    role: str = "kv_both",
    policy: str = "fail",
    parallel: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **others: Any,
) -> Any:
    """``options``: of the connector; the rest replaces parts of vLLM's configuration."""
    text = {"rope_theta": 10000.0, "num_hidden_layers": 2, "_name_or_path": "/models/tiny"}
    model_config = {
        "model": "tiny",
        "revision": None,
        "dtype": torch.bfloat16,
        "quantization": None,
        "enable_sleep_mode": False,
        "hf_config": SimpleNamespace(to_dict=lambda: text),
        "get_layers_start_end_indices": lambda parallel: (0, 2),
        "use_mla": False,
    }
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVFerryConnector",
            kv_role=role,
            engine_id="engine/1",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=options or {},
        ),
        parallel_config=SimpleNamespace(
            **{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **(parallel or {})}
        ),
        cache_config=SimpleNamespace(
            **{
                "cache_dtype": "auto",
                "enable_prefix_caching": True,
                "prefix_caching_hash_algo": "sha256",
                **(cache or {}),
            }
        ),
        model_config=SimpleNamespace(**{**model_config, **(model or {})}),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        **others,
    )


def full_attention() -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )


def cache_config(*specs: KVCacheSpec) -> KVCacheConfig:
    """One group per spec; none: one group of full attention."""
    groups = [KVCacheGroupSpec(list(NAMES), spec) for spec in specs or (full_attention(),)]
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def kv_caches() -> dict[str, torch.Tensor]:
    """One tensor per layer."""
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name in NAMES}
