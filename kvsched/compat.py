"""What we read of vLLM's configuration, in one place, for vLLM 0.23 and later.

Versions are probed, never compared: a missing attribute means the older behaviour.
"""

import hashlib
import json
import os
from typing import TYPE_CHECKING, NamedTuple

from kvcommon.errors import ConfigError
from kvcommon.keys import Namespace

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: KV cache kinds whose blocks are a plain function of the token prefix. Subclasses of vLLM's
#: ``FullAttentionSpec`` (MLA among them) count by their base.
_SERVED_SPEC = "FullAttentionSpec"
#: Parts of a model's configuration that say nothing about its KV.
_UNRELATED = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


class Group(NamedTuple):
    """The one KV cache group that is served."""

    layer_names: tuple[str, ...]
    #: Tokens per block.
    block_size: int
    num_blocks: int
    #: Bytes of one block over all layers, on one rank.
    block_bytes: int = 0


class Placement(NamedTuple):
    """Where a model side sits in its engine."""

    #: Position among all ranks: pipeline stages first, then tensor ranks.
    rank: int
    pipeline_rank: int
    tensor_rank: int
    #: Index of the device on this host.
    local_rank: int


def check_supported(vllm_config: "VllmConfig") -> None:
    """Refuse what would be served wrongly.

    Raises:
        ConfigError: says which feature, and what to change.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"kvferry does not serve context parallelism yet ({name}="
                f"{getattr(parallel, name)}); set it to 1 or leave the connector out"
            )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            "kvferry maps the KV cache from another process, and sleep mode replaces that memory; "
            "start vLLM without --enable-sleep-mode"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "kvferry needs vLLM's prefix caching (its block hashes are our keys); remove "
            "--no-enable-prefix-caching"
        )


def served_group(kv_cache_config: "KVCacheConfig | None") -> Group:
    """Return the KV cache group.

    Raises:
        ConfigError: the model has several groups or a kind of cache that is not served.
    """
    if kv_cache_config is None:
        raise ConfigError("vLLM gave no KV cache configuration; kvferry needs vLLM 0.23 or later")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"kvferry serves models with one KV cache group; this one has {len(groups)} "
            "(hybrid attention). Leave the connector out for it"
        )
    spec = groups[0].kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None) or {"": spec}
    for each in specs.values():
        if _SERVED_SPEC not in {base.__name__ for base in type(each).__mro__}:
            raise ConfigError(
                f"kvferry serves full attention (and MLA) caches; this model has "
                f"{type(each).__name__}. Leave the connector out for it"
            )
    names = tuple(groups[0].layer_names)
    # A uniform spec counts all its layers, a plain one counts one.
    block_bytes = spec.page_size_bytes * (1 if "" not in specs else len(names))
    return Group(names, spec.block_size, kv_cache_config.num_blocks, block_bytes)


def num_ranks(vllm_config: "VllmConfig") -> int:
    """Ranks of one engine: pipeline stages times tensor ranks."""
    parallel = vllm_config.parallel_config
    return int(parallel.pipeline_parallel_size * parallel.tensor_parallel_size)


def rank_index(vllm_config: "VllmConfig", key: tuple[int, ...]) -> int:
    """Position of a rank from the key of vLLM's handshake: (pp, tp), or Ascend's (pp, pcp, tp)."""
    return int(key[0] * vllm_config.parallel_config.tensor_parallel_size + key[-1])


def placement(vllm_config: "VllmConfig") -> Placement:
    """Where this worker process sits. Call on the worker, after vLLM set its groups up."""
    from vllm.distributed import parallel_state

    pipeline = parallel_state.get_pp_group().rank_in_group
    tensor = parallel_state.get_tp_group().rank_in_group
    return Placement(
        rank_index(vllm_config, (pipeline, tensor)),
        pipeline,
        tensor,
        parallel_state.get_world_group().local_rank,
    )


def device_name(device: "torch.device", local_rank: int) -> str:
    """Name the device of a KV tensor: its own index where it has one (never the rank)."""
    kind, index = device.type, device.index
    return f"{kind}:{local_rank if index is None else index}"


def roles(vllm_config: "VllmConfig") -> tuple[bool, bool]:
    """(may load, may save), from ``kv_role``."""
    transfer = vllm_config.kv_transfer_config
    return bool(transfer.is_kv_consumer), bool(transfer.is_kv_producer)


def hooks_wait(vllm_config: "VllmConfig") -> bool:
    """Every batch waits for its layers at ``wait_for_layer_load``.

    Not so with vllm-ascend's MLA: a batch without prefills does not, and a request of which all but
    one token is loaded counts as a decode.
    """
    from vllm.platforms import current_platform

    uses_mla = bool(getattr(vllm_config.model_config, "use_mla", False))
    return not uses_mla or current_platform.device_type != "npu"


def sync_load_is_safe(vllm_config: "VllmConfig") -> bool:
    """A layerwise load may fail without wrong tokens.

    Not so with async scheduling or model runner V2 under the policy ``recompute``: the step in
    flight has already used the bad blocks (vllm#49250).
    """
    if vllm_config.kv_transfer_config.kv_load_failure_policy == "fail":
        return True
    overtaken = bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))
    return not overtaken and not bool(getattr(vllm_config, "use_v2_model_runner", False))


def namespace(
    vllm_config: "VllmConfig", group: Group, where: Placement, layout_digest: str, label: str
) -> Namespace:
    """Identity of what this rank stores and loads."""
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    first = int(getattr(model, "get_layers_start_end_indices", lambda _: (0, 0))(parallel)[0])
    return Namespace(
        model=model.model,
        revision=model.revision or "",
        dtype=str(model.dtype),
        cache_dtype=str(cache.cache_dtype),
        block_sizes=(group.block_size,),
        layout=(layout_digest,),
        layers=(first, len(group.layer_names)),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        rank=(where.pipeline_rank, where.tensor_rank),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=os.environ.get("PYTHONHASHSEED", "default"),
        label=label,
        flags=(
            f"quantization={model.quantization or 'none'}",
            f"config={_config_digest(model)}",
            *_byte_order(vllm_config),
        ),
    )


def _byte_order(vllm_config: "VllmConfig") -> tuple[str, ...]:
    """Ascend's MLA may keep the same shape in another order of bytes (FRACTAL_NZ)."""
    additional = getattr(vllm_config, "additional_config", None)
    if isinstance(additional, dict) and additional.get("enable_kv_nz"):
        return ("kv_nz",)
    return ()


def _config_digest(model: "ModelConfig") -> str:
    """Digest the model's own configuration: RoPE scaling and the like change the KV bytes."""
    config = getattr(model, "hf_text_config", None) or model.hf_config
    plain = {name: value for name, value in config.to_dict().items() if name not in _UNRELATED}
    # The library's own json: names of labels may be numbers, and dtypes are no plain data.
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
