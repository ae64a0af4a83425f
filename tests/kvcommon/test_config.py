import json
import math
import re
from pathlib import Path

import msgspec
import pytest

from kvcommon.config import (
    ConnectorConfig,
    DaemonConfig,
    MooncakeConfig,
    connector_config,
    mooncake_config,
)
from kvcommon.errors import ConfigError


def test_defaults() -> None:
    config = connector_config({})
    assert config == ConnectorConfig()
    assert (config.mode, config.daemons, config.load) == ("daemon", "auto", "auto")
    assert (config.lookup_wait_ms, config.lookup_timeout_ms) == (2.0, 100)
    assert (config.load_timeout_ms, config.ack_timeout_ms) == (5000, 2000)
    assert (config.heartbeat_ms, config.lease_ms) == (1000, 10000)
    assert (config.max_held_fraction, config.min_load_blocks) == (0.25, 1)
    assert config.memory_limit_bytes == 1 << 30


def test_options_are_taken() -> None:
    config = connector_config(
        {
            "mode": "inline",
            "daemons": ["ipc:///a", "ipc:///b"],
            "load": "async",
            "lookup_wait_ms": 0,
            "max_held_fraction": 1,
            "memory_limit": "512 MiB",
            "store": "mooncake",
        }
    )
    assert config.daemons == ["ipc:///a", "ipc:///b"]
    assert config.lookup_wait_ms == 0
    assert config.memory_limit_bytes == 512 << 20


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown option 'lookup_timeout'; did you mean lookup_t"):
        connector_config({"lookup_timeout": 5})


def test_an_option_like_no_other_lists_them_all() -> None:
    with pytest.raises(
        ConfigError, match="unknown option 'zzz'; there are: mode, daemons, run_dir"
    ):
        connector_config({"zzz": 5})


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({"mode": "thread"}, "$.mode"),
        ({"load": "sync"}, "$.load"),
        ({"lookup_wait_ms": "2"}, "$.lookup_wait_ms"),
        ({"lookup_wait_ms": -1}, "$.lookup_wait_ms"),
        ({"lookup_timeout_ms": 0}, "$.lookup_timeout_ms"),
        ({"lookup_timeout_ms": math.nan}, "$.lookup_timeout_ms"),
        ({"lookup_timeout_ms": math.inf}, "$.lookup_timeout_ms"),
        ({"load_timeout_ms": 1e18}, "$.load_timeout_ms"),
        ({"event_log_ring_s": math.inf}, "$.event_log_ring_s"),
        ({"min_load_blocks": 1 << 63}, "$.min_load_blocks"),
        ({"heartbeat_ms": 10_000}, "heartbeat_ms (10000) must be below lease_ms (10000)"),
        ({"lease_ms": 500}, "heartbeat_ms (1000) must be below lease_ms (500)"),
        ({"max_held_fraction": 0}, "$.max_held_fraction"),
        ({"max_held_fraction": 1.5}, "$.max_held_fraction"),
        ({"min_load_blocks": 0}, "$.min_load_blocks"),
        ({"daemons": ["a", 1]}, "$.daemons[1]"),
        ({"daemons": {"0": "a"}}, "$.daemons"),
        ({"save_decode": 1}, "$.save_decode"),
        ({"store": "redis"}, "$.store"),
        ({"memory_limit": "many"}, "memory_limit: 'many' is not a size"),
        ({"daemons": "atuo"}, "daemons: 'atuo' is not an endpoint"),
        ({"daemons": ""}, "daemons: '' is not an endpoint"),
        ({"daemons": ["auto", "auto"]}, "daemons: 'auto' is not an endpoint"),
        ({"daemons": "/run/cpu-0.sock"}, "did you mean ipc:///run/cpu-0.sock?"),
        ({"daemons": ["ipc:///a", "ipc://b"]}, "daemons: 'ipc://b' is not an endpoint"),
    ],
)
def test_a_wrong_value_names_its_path(raw: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(path)) as caught:
        connector_config(raw)
    assert str(caught.value).startswith("kv_connector_extra_config: ")


def write(folder: Path, **fields: object) -> str:
    path = folder / "mooncake.json"
    path.write_text(json.dumps(fields))
    return str(path)


def test_mooncake_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        master_server_address="10.0.0.1:50051",
        global_segment_size="4GB",
        local_buffer_size=1024,
        protocol="rdma",
        prefer_alloc_in_same_node=True,
    )
    config = mooncake_config(path, {})
    assert config.master_server_address == "10.0.0.1:50051"
    assert config.global_segment_size == 4_000_000_000
    assert config.local_buffer_size == 1024
    assert config.protocol == "rdma"
    assert config.prefer_alloc_in_same_node
    assert config.metadata_server == "P2PHANDSHAKE"
    assert config.store_lease_ms == 10000
    for nothing in ("", None):
        assert mooncake_config(nothing, {"MOONCAKE_CONFIG_PATH": path}) == config


def test_a_given_path_comes_before_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, master_server_address="a:1")
    environ = {"MOONCAKE_CONFIG_PATH": str(tmp_path / "none.json")}
    assert mooncake_config(path, environ).master_server_address == "a:1"


def test_environment_overrides_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, master_server_address="a:1", global_segment_size="many")
    environ = {"MOONCAKE_MASTER": "b:2", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1GiB"}
    config = mooncake_config(path, environ)
    assert config.master_server_address == "b:2"
    assert config.global_segment_size == 1 << 30


def test_the_master_alone_is_enough() -> None:
    assert mooncake_config(None, {"MOONCAKE_MASTER": "b:2"}) == MooncakeConfig(
        master_server_address="b:2"
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "no master_server_address.*MOONCAKE_MASTER"),
        ({"master_server_address": ""}, "no master_server_address"),
        ({"master_server_addres": "a:1"}, "no master_server_address"),
        ({"master_server_address": "a:1", "device_nam": "x"}, "did you mean device_name?"),
        (
            {"master_server_address": 5},
            r"Expected `str`, got `int` - at `\$.master_server_address`",
        ),
        ({"master_server_address": "a:1", "global_segment_size": "4XB"}, "size: '4XB' is not a"),
        ({"master_server_address": "a:1", "local_buffer_size": [1]}, "local_buffer_size:"),
    ],
)
def test_a_wrong_mooncake_file_is_named(
    tmp_path: Path, fields: dict[str, object], text: str
) -> None:
    path = write(tmp_path, **fields)
    with pytest.raises(ConfigError, match=text) as caught:
        mooncake_config(path, {})
    assert str(caught.value).startswith(path)


def test_a_wrong_variable_is_named() -> None:
    environ = {"MOONCAKE_MASTER": "b:2", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "4XB"}
    with pytest.raises(ConfigError, match=r"^MOONCAKE_GLOBAL_SEGMENT_SIZE: "):
        mooncake_config(None, environ)


def test_no_mooncake_configuration_at_all() -> None:
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH to Mooncake's JSON file"):
        mooncake_config(None, {})


@pytest.mark.parametrize("text", ["", "{", "[1]", '"text"', "\x00\xff"])
def test_what_is_not_json_for_mooncake(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not Mooncake's JSON configuration"):
        mooncake_config(str(path), {})


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file"):
        mooncake_config(str(tmp_path / "none.json"), {})


def test_daemon_configuration_can_be_logged() -> None:
    config = DaemonConfig(device="cpu:0", store="memory")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=DaemonConfig) == config
    assert (config.memory_limit, config.heartbeat_ms, config.save_nice) == (1 << 30, 1000, 10)
