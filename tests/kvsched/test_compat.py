"""What we read of vLLM's configuration, and what we refuse."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import (
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvcommon.errors import ConfigError
from kvcommon.keys import fingerprint
from kvsched import compat
from tests.support.vllmconfig import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NAMES,
    NUM_BLOCKS,
    NUM_HEADS,
    cache_config,
    full_attention,
    vllm_config,
)

GROUP = compat.Group(NAMES, BLOCK_SIZE, NUM_BLOCKS)
#: Of one block in one layer: K and V in two bytes.
KV_BYTES = 2 * 2 * BLOCK_SIZE * NUM_HEADS * HEAD_SIZE
HERE = compat.Placement(0, 0, 0, 0)


def sliding() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16,
        sliding_window=32,
    )


def test_what_is_supported_is_let_through() -> None:
    compat.check_supported(vllm_config())


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size=2"),
        ({"parallel": {"prefill_context_parallel_size": 4}}, "prefill_context_parallel_size=4"),
        ({"model": {"enable_sleep_mode": True}}, "--enable-sleep-mode"),
        ({"cache": {"enable_prefix_caching": False}}, "--no-enable-prefix-caching"),
    ],
)
def test_what_would_be_served_wrongly_is_refused(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compat.check_supported(vllm_config(**parts))


def test_the_one_group() -> None:
    assert compat.served_group(cache_config()) == GROUP._replace(block_bytes=len(NAMES) * KV_BYTES)
    latent = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    assert compat.served_group(cache_config(latent))[:3] == GROUP[:3]


def test_several_full_attention_layers_of_one_type() -> None:
    specs = {name: full_attention() for name in NAMES}
    uniform = UniformTypeKVCacheSpecs(block_size=BLOCK_SIZE, kv_cache_specs=specs)
    served = compat.served_group(cache_config(uniform))
    assert served == GROUP._replace(block_bytes=len(NAMES) * KV_BYTES)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param(lambda: None, "vLLM 0.23", id="none"),
        pytest.param(lambda: cache_config(full_attention(), sliding()), "has 2", id="hybrid"),
        pytest.param(lambda: cache_config(sliding()), "SlidingWindowSpec", id="sliding"),
        pytest.param(
            lambda: cache_config(
                UniformTypeKVCacheSpecs(
                    block_size=BLOCK_SIZE, kv_cache_specs={"a": full_attention(), "b": sliding()}
                )
            ),
            "SlidingWindowSpec",
            id="sliding within",
        ),
    ],
)
def test_other_groups_are_refused(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compat.served_group(config())


def test_ranks_are_counted_stage_by_stage() -> None:
    config = vllm_config(parallel={"tensor_parallel_size": 4, "pipeline_parallel_size": 2})
    assert compat.num_ranks(config) == 8
    keys = [(pp, tp) for pp in range(2) for tp in range(4)]
    assert [compat.rank_index(config, key) for key in keys] == list(range(8))
    # Ascend's key has the context parallel rank in between.
    assert compat.rank_index(config, (1, 0, 3)) == 7


def test_placement_comes_from_vllms_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"pp": 1, "tp": 3}
    for name, rank in groups.items():
        group = SimpleNamespace(rank_in_group=rank)
        monkeypatch.setattr(parallel_state, f"get_{name}_group", lambda group=group: group)
    world = SimpleNamespace(local_rank=5)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)
    config = vllm_config(parallel={"tensor_parallel_size": 4, "pipeline_parallel_size": 2})
    assert compat.placement(config) == compat.Placement(7, 1, 3, 5)


def test_a_device_is_named_by_its_own_index() -> None:
    assert compat.device_name(torch.device("cuda", 3), 1) == "cuda:3"
    assert compat.device_name(torch.device("cpu"), 1) == "cpu:1"


@pytest.mark.parametrize(
    ("role", "can"),
    [("kv_both", (True, True)), ("kv_consumer", (True, False)), ("kv_producer", (False, True))],
)
def test_roles(role: str, can: tuple[bool, bool]) -> None:
    assert compat.roles(vllm_config(role=role)) == can


def test_a_synchronous_load_may_fail_only_where_nothing_has_overtaken_it() -> None:
    assert compat.sync_load_is_safe(vllm_config(policy="fail", use_v2_model_runner=True))
    plain = vllm_config(policy="recompute")
    assert compat.sync_load_is_safe(plain)
    plain.scheduler_config.async_scheduling = True
    assert not compat.sync_load_is_safe(plain)
    assert not compat.sync_load_is_safe(vllm_config(policy="recompute", use_v2_model_runner=True))


def identity(layout: str = "layout", label: str = "", where: Any = HERE, **parts: Any) -> str:
    return fingerprint(compat.namespace(vllm_config(**parts), GROUP, where, layout, label))


def config_of(**values: Any) -> dict[str, Any]:
    return {"hf_config": SimpleNamespace(to_dict=lambda: values)}


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"model": "other"}},
        {"model": {"revision": "abc"}},
        {"model": {"dtype": torch.float16}},
        {"model": {"quantization": "w8a8"}},
        {"cache": {"cache_dtype": "fp8"}},
        {"cache": {"prefix_caching_hash_algo": "xxhash"}},
        {"parallel": {"tensor_parallel_size": 2}},
        {"parallel": {"pipeline_parallel_size": 2}},
        {"where": compat.Placement(1, 0, 1, 0)},
        {"layout": "another"},
        {"label": "tenant"},
        {"model": {"get_layers_start_end_indices": lambda _: (2, 4)}},
        {"model": config_of(rope_theta=500000.0, num_hidden_layers=2)},
        {"additional_config": {"enable_kv_nz": True}},
    ],
)
def test_whatever_changes_the_bytes_changes_the_identity(other: dict[str, Any]) -> None:
    assert identity(**other) != identity()


def test_the_hash_seed_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = identity()
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert identity() != one


@pytest.mark.parametrize(
    "same",
    [
        config_of(rope_theta=10000.0, num_hidden_layers=2, _name_or_path="/elsewhere"),
        config_of(rope_theta=10000.0, num_hidden_layers=2, transformers_version="9"),
        {"revision": ""},
    ],
)
def test_what_says_nothing_about_the_bytes_does_not(same: dict[str, Any]) -> None:
    assert identity(model=same) == identity()


def test_hooks_wait_everywhere_but_in_ascends_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.hooks_wait(vllm_config())
    assert compat.hooks_wait(vllm_config(model={"use_mla": True}))
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(device_type="npu"))
    assert compat.hooks_wait(vllm_config())
    assert not compat.hooks_wait(vllm_config(model={"use_mla": True}))
