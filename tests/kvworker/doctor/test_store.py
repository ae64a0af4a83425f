import socket
from pathlib import Path

import pytest

from kvworker.doctor.report import Surroundings, Verdict
from kvworker.doctor.store import check_store
from localmaster import LocalMaster


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


@pytest.mark.parametrize("address", ["localhost", "host:", ":1", "host:65536", "two..dots:1"])
def test_what_is_no_address_is_said_as_the_daemon_would(address: str) -> None:
    _, findings = check_store(Surroundings({"MOONCAKE_MASTER": address}), "")
    assert findings[-1].verdict is Verdict.FAIL
    assert "is not HOST:PORT" in findings[-1].found


@pytest.mark.parametrize(
    ("size", "verdict"),
    [("0", Verdict.OK), ("64KiB", Verdict.FAIL), ("16MiB", Verdict.OK), ("8000TiB", Verdict.WARN)],
)
def test_a_segment_that_mooncake_cannot_allocate(size: str, verdict: Verdict) -> None:
    environ = {"MOONCAKE_MASTER": "127.0.0.1:1", "MOONCAKE_GLOBAL_SEGMENT_SIZE": size}
    _, findings = check_store(Surroundings(environ), "")
    (segment,) = [each for each in findings if each.name == "store segment"]
    assert segment.verdict is verdict


def test_a_master_is_asked_and_not_only_looked_at() -> None:
    with LocalMaster() as master:
        around = Surroundings({"MOONCAKE_MASTER": master.address})
        _, findings = check_store(around, "", probe=True)
        assert findings[-1].verdict is Verdict.OK, findings[-1]
        master.freeze()
        _, findings = check_store(around, "", probe=True)
        assert findings[-1].verdict is Verdict.FAIL
        assert "frozen" in findings[-1].found


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    _, findings = check_store(Surroundings({}), "")
    assert findings[0].verdict is Verdict.FAIL
    assert "kvferry[npu]" in findings[0].found
