"""From vLLM's configuration and ours to the two sides."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from kvcommon.config import ConnectorConfig, connector_config
from kvcommon.errors import ConfigError
from kvcommon.ids import EngineId
from kvsched import assembly, compat
from kvsched.assembly import build_model_side, core_config, rank_endpoint
from kvsched.metadata import RankInfo, read_rank_handshake
from kvsched.model_side import ModelSide
from kvworker.ask import ask_status
from kvworker.inline import start
from tests.support.daemonproc import daemon as real_daemon
from tests.support.fakedaemon import until
from tests.support.vllmconfig import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NAMES,
    NUM_BLOCKS,
    NUM_HEADS,
    kv_caches,
    vllm_config,
)

GROUP = compat.Group(NAMES, BLOCK_SIZE, NUM_BLOCKS)
ENGINE = EngineId("engine/1")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only rank of its engine, outside of vLLM's groups."""
    monkeypatch.setattr(compat, "placement", lambda _: compat.Placement(0, 0, 0, 0))


def build(config: ConnectorConfig, caches: dict[str, torch.Tensor]) -> tuple[ModelSide, RankInfo]:
    model, handshake = build_model_side(config, vllm_config(), ENGINE, GROUP, caches)
    return model, read_rank_handshake(handshake)


def attaches(model: ModelSide) -> None:
    pause = threading.Event()
    until(lambda: model.describe()["attached"], lambda timeout_ms: pause.wait(timeout_ms / 1e3))


def test_what_the_core_is_told(caplog: pytest.LogCaptureFixture) -> None:
    options = {
        "load": "async",
        "save_decode": True,
        "lookup_timeout_ms": 7,
        "ack_timeout_ms": 8,
        "load_timeout_ms": 9,
        "max_held_fraction": 0.5,
        "min_load_blocks": 3,
        "validate": True,
    }
    core = core_config(connector_config(options), vllm_config(policy="recompute"), GROUP)
    assert (core.block_size, core.num_blocks, core.load) == (BLOCK_SIZE, NUM_BLOCKS, "async")
    assert (core.can_load, core.can_save, core.save_decode) == (True, True, True)
    assert (core.lookup_timeout_ms, core.ack_timeout_ms, core.load_timeout_ms) == (7, 8, 9)
    assert (core.max_held_blocks, core.min_load_blocks) == (4, 3)
    assert core.sync_is_safe
    assert core.validate
    assert "kv_load_failure_policy" not in caplog.text
    core_config(connector_config({}), vllm_config(policy="fail"), GROUP)
    assert "'recompute' computes it instead" in caplog.text


def test_endpoints(tmp_path: Path) -> None:
    auto = ConnectorConfig(run_dir=str(tmp_path / "run"))
    assert rank_endpoint(auto, "npu:3", 0) == f"ipc://{tmp_path}/run/npu-3.sock"
    one = ConnectorConfig(daemons="ipc:///x.sock")
    assert rank_endpoint(one, "npu:3", 5) == "ipc:///x.sock"
    each = ConnectorConfig(daemons=["ipc:///a", "ipc:///b"])
    assert rank_endpoint(each, "npu:3", 1) == "ipc:///b"
    with pytest.raises(ConfigError, match="lists 2 endpoints, and this is rank 2"):
        rank_endpoint(each, "npu:3", 2)


def test_a_model_side_attaches_to_the_daemon_of_its_device() -> None:
    caches = kv_caches()
    with real_daemon() as running:
        model, info = build(ConnectorConfig(run_dir=str(running.directory)), caches)
        assert info.endpoint == running.endpoint
        assert (info.rank, info.device) == (0, "cpu:0")
        # Two layers with K and V.
        assert info.object_bytes == 2 * 2 * BLOCK_SIZE * NUM_HEADS * HEAD_SIZE * 2
        assert (info.block_size, info.num_blocks) == (BLOCK_SIZE, NUM_BLOCKS)
        attaches(model)
        assert model.describe()["layers"] == len(NAMES)
        model.close()
    # Still ours after the daemon has let go of it.
    caches[NAMES[0]].fill_(1)


def test_inline_runs_the_daemon_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    started: list[Any] = []

    class Entry:
        def load(self) -> Any:
            return lambda *args, **kwargs: started.append(start(*args, **kwargs))

    monkeypatch.setattr(assembly, "entry_points", lambda **_: [Entry()])
    config = ConnectorConfig(
        mode="inline",
        run_dir=str(tmp_path),
        store="memory",
        memory_limit="1MiB",
        event_log=str(tmp_path / "log"),
        event_log_redact=True,
    )
    model, info = build(config, kv_caches())
    attaches(model)
    # Slashes of an engine id do not get into file names.
    assert Path(info.endpoint.removeprefix("ipc://")).parent == tmp_path
    assert ask_status(info.endpoint, 20).metrics["kvferry_store_bytes_limit"] == 1 << 20
    given = started[0]._daemon.config
    assert (given.event_log, given.event_log_redact) == (config.event_log, True)
    model.close()
    started[0].stop()
    context.term()


def test_inline_needs_the_daemons_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "entry_points", lambda **_: [])
    with pytest.raises(ConfigError, match="installed kvferry"):
        build(ConnectorConfig(mode="inline", run_dir=str(tmp_path)), kv_caches())
