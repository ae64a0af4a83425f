import socket
from pathlib import Path

import pytest

from kvworker.doctor.report import Surroundings, Verdict
from kvworker.doctor.store import check_store


def test_without_a_configuration_the_remedy_names_the_ways_to_give_one() -> None:
    config, findings = check_store(Surroundings({}), "")
    assert config is None
    assert findings[-1].verdict is Verdict.FAIL
    assert "MOONCAKE_CONFIG_PATH" in findings[-1].remedy


def test_a_master_that_answers_and_one_that_does_not(tmp_path: Path) -> None:
    del tmp_path
    with socket.create_server(("127.0.0.1", 0)) as master:
        address = f"127.0.0.1:{master.getsockname()[1]}"
        config, findings = check_store(Surroundings({"MOONCAKE_MASTER": address}), "")
        assert config is not None
        assert findings[-1].verdict is Verdict.OK
    _, findings = check_store(Surroundings({"MOONCAKE_MASTER": address}), "")
    assert findings[-1].verdict is Verdict.FAIL
    assert "mooncake_master --rpc_address 127.0.0.1" in findings[-1].remedy


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    _, findings = check_store(Surroundings({}), "")
    assert findings[0].verdict is Verdict.FAIL
    assert "kvferry[npu]" in findings[0].found
