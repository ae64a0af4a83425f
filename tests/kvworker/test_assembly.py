"""From a configuration to parts that fit together."""

import contextlib
import threading
from pathlib import Path

import msgspec
import pytest

from kvcommon.config import DaemonConfig
from kvcommon.errors import ConfigError
from kvcommon.eventlog import read_log
from kvworker.assembly import assemble, make_store, opening_store
from kvworker.core.core import CoreConfig
from kvworker.core.events import Ticked, WorkerEvent
from kvworker.devices.factory import make_device


def test_memory_store_has_the_configured_limit() -> None:
    store = make_store(DaemonConfig(device="cpu:0", store="memory", memory_limit=12345))
    assert store.name == "memory"
    assert store.metrics()["bytes_limit"] == 12345


def test_mooncake_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOONCAKE_MASTER", "MOONCAKE_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="MOONCAKE_MASTER"):
        make_store(DaemonConfig(device="cpu:0", store="mooncake"))


def test_the_log_lets_a_core_be_made_again(tmp_path: Path) -> None:
    config = DaemonConfig(
        device="cpu:0", store="memory", event_log=str(tmp_path / "log"), validate=True
    )
    failed = threading.Event()
    posted: list[WorkerEvent] = []
    store = opening_store(config, failed.set)
    made = assemble(config, 0xABCDEF, make_device("cpu:0"), store, posted.append)
    with contextlib.closing(made.executor):
        made.recorder.handle(Ticked(now_ns=1), "someone:1")
        assert made.recorder.stimulus == "kvworker-cpu-0-00abcdef:1"
        assert made.writer is not None
        made.writer.close()
    log = read_log(next((tmp_path / "log").iterdir()))
    core = msgspec.msgpack.decode(log.header.config, type=CoreConfig)
    assert (core.device, core.store, core.validate) == ("cpu:0", "memory", True)
    assert log.header.epoch == 0xABCDEF
    assert [record.cause for record in log] == ["someone:1"]


def test_no_log_unless_asked() -> None:
    config = DaemonConfig(device="cpu:0", store="memory")
    store = opening_store(config, lambda: None)
    made = assemble(config, 1, make_device("cpu:0"), store, lambda _event: None)
    made.executor.close()
    assert made.writer is None


def test_a_log_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = DaemonConfig(device="cpu:0", store="memory", event_log=str(tmp_path / "file"))
    store = opening_store(config, lambda: None)
    with pytest.raises(ConfigError):
        assemble(config, 1, make_device("cpu:0"), store, lambda _event: None)
