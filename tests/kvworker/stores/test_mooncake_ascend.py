"""The rules of Mooncake's ascend transport that need no card; the rest is in ``tests/npu``."""

import pytest

from kvcommon.config import MooncakeConfig
from kvcommon.errors import ConfigError, StoreError
from kvworker.stores.mooncake_ascend import (
    FABRIC,
    check,
    make_engine,
    prepare_environment,
    timeout_ms,
    uses_fabric,
)


def config(**more: object) -> MooncakeConfig:
    return MooncakeConfig(master_server_address="127.0.0.1:1", **more)  # type: ignore[arg-type]


def test_a_value_of_zero_does_not_switch_fabric_memory_on() -> None:
    environ = {FABRIC: "0"}
    prepare_environment(environ)
    assert FABRIC not in environ
    environ = {FABRIC: "1"}
    prepare_environment(environ)
    assert uses_fabric(environ)


def test_transfers_end_before_a_lease_does() -> None:
    assert timeout_ms({}) == 10_000, "what the library takes"
    with pytest.raises(StoreError, match="--default_kv_lease_ttl 11000"):
        check(config(protocol="ascend"), {})
    environ: dict[str, str] = {}
    prepare_environment(environ)
    check(config(protocol="ascend"), environ)
    environ = {"ASCEND_TRANSFER_TIMEOUT": "60000"}
    prepare_environment(environ)
    with pytest.raises(StoreError, match="60000 ms"):
        check(config(protocol="ascend"), environ)
    check(config(protocol="ascend", store_lease_ms=61_000), environ)


def test_fabric_memory_comes_in_whole_gibibytes() -> None:
    environ = {FABRIC: "1"}
    prepare_environment(environ)
    with pytest.raises(StoreError, match="multiple of 1 GiB"):
        check(config(protocol="ascend", global_segment_size=100), environ)


def test_other_protocols_need_no_engine_and_ascend_needs_a_card() -> None:
    assert make_engine(config(), None) is None
    with pytest.raises(ConfigError, match=r"--device npu:<n>"):
        make_engine(config(protocol="ascend"), None)
    assert make_engine(config(protocol="ascend"), lambda: None) is not None
