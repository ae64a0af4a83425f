"""What we rely on in vllm-ascend and torch_npu, looked up in their sources: no part may have moved.

vllm-ascend is read from its wheels (``make test-npu`` fetches them), not installed: it needs CANN.
"""

import ast
import importlib.util
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: Releases that we name as supported: the oldest, and the newest candidate with a wheel.
RELEASES = ("0.23.0", "0.26.0rc1")
WHEELS = Path(os.environ.get("KVFERRY_WHEELS", "build/wheels"))

Source = Callable[[str], str]


@pytest.fixture(scope="module", params=RELEASES)
def ascend(request: pytest.FixtureRequest) -> Iterator[Source]:
    """Text of a file of one release."""
    found = sorted(WHEELS.glob(f"vllm_ascend-{request.param}-*.whl"))
    if not found:
        pytest.skip(
            f"no wheel of vllm-ascend {request.param} in {WHEELS}: make test-npu fetches it"
        )
    with zipfile.ZipFile(found[0]) as wheel:

        def read(name: str) -> str:
            path = f"vllm_ascend/{name}"
            assert path in wheel.namelist(), f"vllm-ascend {request.param} has no {path} any more"
            return wheel.read(path).decode()

        yield read


def torch_npu(name: str) -> str:
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / name
    assert path.exists(), f"torch_npu has no {name} any more"
    return path.read_text(encoding="utf-8")


def function(text: str, name: str) -> str:
    """Source of a function or method."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return ast.get_source_segment(text, node) or ""
    raise AssertionError(f"there is no function {name} any more")


def classes(text: str) -> dict[str, str]:
    """Sources of the classes of a module."""
    return {
        node.name: ast.get_source_segment(text, node) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    }


# -- vllm-ascend -----------------------------------------------------------------------------------


def test_expandable_segments_are_its_default_but_for_the_users_word(ascend: Source) -> None:
    text = ascend("platform.py")
    assert 'os.getenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")' in text
    assert '"expandable_segments" not in npu_alloc_configs' in text
    assert 'os.environ["PYTORCH_NPU_ALLOC_CONF"] = npu_alloc_configs' in text


def test_the_connector_is_made_before_the_cache_is_allocated(ascend: Source) -> None:
    """Where expandable segments are switched off (``kvcommon.memory.allocator``)."""
    body = function(ascend("worker/worker.py"), "initialize_from_config")
    connector = body.index("ensure_kv_transfer_initialized(")
    assert connector < body.index("self.model_runner.initialize_kv_cache(")


def test_the_connector_is_handed_the_cache_after_that(ascend: Source) -> None:
    body = function(ascend("worker/model_runner_v1.py"), "initialize_kv_cache")
    registered = body.index("register_kv_caches(kv_caches)")
    assert body.index("initialize_kv_cache_tensors(") < registered


def test_sleep_mode_takes_memory_from_its_own_pool(ascend: Source) -> None:
    body = function(ascend("worker/worker.py"), "initialize_from_config")
    assert "enable_sleep_mode" in body
    assert "CaMemAllocator" in body


def test_planes_lie_on_two_mebibytes_when_there_is_a_connector(ascend: Source) -> None:
    text = ascend("worker/model_runner_v1.py")
    body = function(text, "_allocate_int8_cache_tensor")
    assert "self.vllm_config.kv_transfer_config is None" in body
    assert "self._align_memory(" in body
    assert "2 * 1024 * 1024" in text


def test_mla_waits_only_in_batches_with_prefills(ascend: Source) -> None:
    """Why ``compat.hooks_wait`` says no for it."""
    text = ascend("attention/mla_v1.py")
    lines = [line.strip() for line in text.splitlines()]
    waits = [
        n for n, line in enumerate(lines) if line == "wait_for_kv_layer_from_connector(layer_name)"
    ]
    assert waits, "mla_v1 does not wait at all any more"
    assert all(lines[n - 1] == "if has_prefill:" for n in waits), "then hooks_wait may say yes"


@pytest.mark.parametrize("backend", ["mla_v1", "sfa_v1", "dsa_v1"])
def test_these_backends_call_both_hooks_with_the_layers_name(ascend: Source, backend: str) -> None:
    text = ascend(f"attention/{backend}.py")
    assert "wait_for_kv_layer_from_connector(layer_name)" in text
    assert "maybe_save_kv_layer_to_connector(layer_name, list(kv_cache))" in text


def test_the_hooks_reach_the_connector(ascend: Source) -> None:
    text = ascend("attention/utils.py")
    assert "connector.wait_for_layer_load(layer_name)" in function(
        text, "wait_for_kv_layer_from_connector"
    )
    assert "connector.save_kv_layer(layer_name," in function(
        text, "maybe_save_kv_layer_to_connector"
    )


def test_linear_attention_names_no_layer(ascend: Source) -> None:
    """An empty name, which ``kvsched.hooks`` ignores."""
    assert 'maybe_save_kv_layer_to_connector("", [])' in ascend("ops/gdn.py")


def test_the_order_of_bytes_is_an_option(ascend: Source) -> None:
    """It goes into keys (``compat.namespace``)."""
    assert 'additional_config.get("enable_kv_nz", False)' in ascend("ascend_config.py")


def test_devices_are_made_visible_by_this_variable(ascend: Source) -> None:
    assert 'device_control_env_var: str = "ASCEND_RT_VISIBLE_DEVICES"' in ascend("platform.py")


@pytest.mark.parametrize(
    "field",
    [
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "finished_req_ids",
        "preempted_req_ids",
    ],
)
def test_its_scheduler_fills_what_we_read(ascend: Source, field: str) -> None:
    body = classes(ascend("core/recompute_scheduler.py"))["RecomputeScheduler"]
    assert f"{field}=" in body, f"RecomputeScheduler does not fill {field} any more"


# -- torch_npu -------------------------------------------------------------------------------------


def test_storages_can_be_shared() -> None:
    text = torch_npu("utils/storage.py")
    for name in ("_share_npu_", "_new_shared_npu", "_release_ipc_counter_npu"):
        assert f'setattr(torch.UntypedStorage, "{name}"' in text, f"{name} has moved"


def test_the_allocator_can_be_told_at_run_time() -> None:
    assert function(torch_npu("npu/memory.py"), "_set_allocator_settings")


def test_events_can_be_shared() -> None:
    event = classes(torch_npu("npu/streams.py"))["Event"]
    for name in ("ipc_handle", "from_ipc_handle", "record", "wait"):
        assert f"def {name}(" in event, f"Event.{name} has moved"
    assert "interprocess=False" in event


def test_collecting_what_is_released_is_there() -> None:
    assert function(torch_npu("npu/utils.py"), "ipc_collect")
