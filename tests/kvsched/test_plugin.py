"""vLLM finds the connector by name."""

from importlib.metadata import entry_points

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvsched.connector import KVFerryConnector
from kvsched.plugin import CONNECTOR, register


def test_registers_once_however_often_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    register()
    register()
    assert list(KVConnectorFactory._registry) == ["KVFerryConnector"]
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR) is KVFerryConnector


def test_is_an_entry_point_of_vllm() -> None:
    found = [each for each in entry_points(group="vllm.general_plugins") if each.name == "kvferry"]
    if not found:
        pytest.skip("kvferry is not installed here")
    assert found[0].load() is register
