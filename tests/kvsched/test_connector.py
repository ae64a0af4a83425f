"""The connector against vLLM's own interface, and its checks at construction."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)
from vllm.utils.func_utils import supports_kw
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput

from kvcommon.errors import ConfigError
from kvsched import compat
from kvsched.connector import KVFerryConnector
from kvsched.metadata import StepMetadata, StepReport
from tests.support.vllmconfig import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NAMES,
    NUM_BLOCKS,
    NUM_HEADS,
    cache_config,
    full_attention,
    kv_caches,
    vllm_config,
)

BASES = (KVConnectorBase_V1, SupportsHMA)


@pytest.fixture(autouse=True)
def own_context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    yield
    context.term()


def scheduler(**parts: Any) -> KVFerryConnector:
    made = KVFerryConnector(vllm_config(**parts), KVConnectorRole.SCHEDULER, cache_config())
    made.bind_gpu_block_pool(
        BlockPool(num_gpu_blocks=NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_SIZE)
    )
    return made


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVFerryConnector]:
    """With a KV cache, and a daemon that is not there."""
    monkeypatch.setattr(compat, "placement", lambda _: compat.Placement(0, 0, 0, 0))
    config = vllm_config({"run_dir": str(tmp_path)})
    made = KVFerryConnector(config, KVConnectorRole.WORKER, cache_config())
    made.register_kv_caches(kv_caches())
    yield made
    made.shutdown()


# -- the interface ---------------------------------------------------------------------------------


def overridden() -> list[tuple[type, str]]:
    return [
        (base, name)
        for base in BASES
        for name in vars(base)
        if name in vars(KVFerryConnector) and not name.startswith("__") and name[0] != "_"
    ]


def test_nothing_abstract_is_left() -> None:
    assert not inspect.isabstract(KVFerryConnector)
    names = {name for base in BASES for name in base.__abstractmethods__}
    assert names <= set(vars(KVFerryConnector))


@pytest.mark.parametrize(
    ("base", "name"), [pytest.param(*pair, id=pair[1]) for pair in overridden()]
)
def test_every_override_is_what_vllm_expects(base: type, name: str) -> None:
    theirs = inspect.getattr_static(base, name)
    ours = inspect.getattr_static(KVFerryConnector, name)
    # A method in the place of a property would be true whatever it returned.
    assert type(ours) is type(theirs)
    if isinstance(theirs, property):
        return
    if isinstance(theirs, classmethod):
        theirs, ours = theirs.__func__, ours.__func__
    expected = inspect.signature(theirs).parameters
    given = inspect.signature(ours).parameters
    # By position and by name.
    assert list(given) == list(expected)
    for parameter in expected.values():
        assert given[parameter.name].kind is parameter.kind
        if parameter.default is not inspect.Parameter.empty:
            assert given[parameter.name].default == parameter.default


def test_what_is_public_is_part_of_the_interface() -> None:
    """A method that vLLM never calls would be one that it has renamed."""
    known = {name for base in BASES for name in vars(base)}
    ours = {name for name in vars(KVFerryConnector) if not name.startswith("_")}
    assert ours - known == {"scheduler"}


def test_what_vllm_asks_of_the_class() -> None:
    assert supports_hma(KVFerryConnector)
    assert supports_kw(KVFerryConnector, "kv_cache_config")
    assert KVFerryConnector.requires_piecewise_for_cudagraph({})
    with pytest.raises(ConfigError, match="did you mean load"):
        KVFerryConnector.requires_piecewise_for_cudagraph({"lod": "async"})
    assert KVFerryConnector.get_required_kvcache_layout(vllm_config()) is None


def test_where_hits_come_from_is_left_to_vllm() -> None:
    source = getattr(KVConnectorBase_V1, "_cache_hit_source", None)
    if source is None:
        pytest.skip("this vLLM does not ask for the source of hits")
    # The store is remote: neither this host's memory nor its disk.
    assert KVFerryConnector._cache_hit_source is source


# -- construction ----------------------------------------------------------------------------------


def sliding() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16,
        sliding_window=32,
    )


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize(
    ("parts", "specs", "said"),
    [
        pytest.param({"options": {"lod": "async"}}, (), "did you mean load", id="option"),
        pytest.param({"options": {"load": "fast"}}, (), "load", id="value"),
        pytest.param({}, (full_attention, full_attention), "has 2", id="groups"),
        pytest.param({}, (sliding,), "SlidingWindowSpec", id="sliding window"),
        pytest.param({"model": {"enable_sleep_mode": True}}, (), "sleep", id="sleep mode"),
        pytest.param(
            {"parallel": {"decode_context_parallel_size": 2}}, (), "context parallel", id="dcp"
        ),
        pytest.param({"cache": {"enable_prefix_caching": False}}, (), "prefix caching", id="apc"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    role: KVConnectorRole,
    parts: dict[str, Any],
    specs: tuple[Any, ...],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caches = cache_config(*(spec() for spec in specs))
    with pytest.raises(ConfigError, match=said) as caught:
        KVFerryConnector(vllm_config(**parts), role, caches)
    # vLLM shows the exception in the middle of its tracebacks; this is one line.
    assert f"kvferry: vLLM cannot start like this: {caught.value}" in caplog.messages


def test_a_log_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="log"):
        scheduler(options={"event_log": str(tmp_path / "file" / "log")})


# -- both roles without a daemon -------------------------------------------------------------------


def test_the_scheduler_role_serves_without_a_daemon(worker: KVFerryConnector) -> None:
    connector = scheduler()
    handshake = worker.get_handshake_metadata()
    assert handshake is not None
    connector.set_xfer_handshake_metadata({0: handshake})
    request: Any = type("Request", (), {})()
    request.request_id, request.num_tokens = "r", 3 * BLOCK_SIZE
    request.block_hashes = [b"1", b"2", b"3"]
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, KVCacheBlocks(([],)), 0)
    metadata = connector.build_connector_meta(SchedulerOutput.make_empty())
    assert metadata == StepMetadata(1)
    assert connector.requires_kv_delivery is False
    assert connector.has_pending_push_work() is False
    connector.update_connector_output(KVConnectorOutput())
    connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=StepReport(1)))
    assert connector.request_finished(request, [1]) == (False, None)
    assert connector.request_finished_all_groups(request, ([1],)) == (False, None)
    assert list(connector.take_events()) == []
    assert connector.reset_cache() is False, "nobody was there to be told"
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["resets"] == 1
    assert connector.get_kv_connector_stats() is None
    connector.shutdown()


def test_a_handshake_that_lacks_a_rank_is_said_and_not_used(
    worker: KVFerryConnector, caplog: pytest.LogCaptureFixture
) -> None:
    connector = scheduler()
    connector.set_xfer_handshake_metadata({})
    assert "named ranks [], and this engine has 1" in caplog.text
    assert connector.scheduler._ranks is None
    connector.shutdown()


def test_the_worker_role_serves_without_a_daemon(worker: KVFerryConnector) -> None:
    context: Any = None
    tensor = torch.zeros(1)
    worker.bind_connector_metadata(StepMetadata(1))
    worker.start_load_kv(context)
    for name in NAMES:
        worker.wait_for_layer_load(name)
        worker.save_kv_layer(name, tensor, context)
    worker.wait_for_save()
    assert worker.get_finished({"r"}) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    worker.clear_connector_metadata()
    assert not worker.has_connector_metadata()
    assert worker.get_kv_connector_stats() is None
    assert worker.has_pending_push_work() is False


def test_before_it_has_a_cache_the_worker_role_does_nothing() -> None:
    worker = KVFerryConnector(
        vllm_config({"mode": "inline"}), KVConnectorRole.WORKER, cache_config()
    )
    context: Any = None
    worker.bind_connector_metadata(StepMetadata(1))
    worker.start_load_kv(context)
    worker.wait_for_layer_load(NAMES[0])
    worker.save_kv_layer(NAMES[0], torch.zeros(1), context)
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    worker.clear_connector_metadata()
    assert worker.get_handshake_metadata() is None
    with pytest.raises(AssertionError, match="not the scheduler role"):
        worker.scheduler.reset()
    worker.shutdown()
