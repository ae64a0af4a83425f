import pytest

from kvcommon.errors import ConfigError, HandleError
from kvworker.devices.factory import make_device
from kvworker.devices.faults import InjectedFault, faulty_device
from kvworker.faults import Plan, Rule


def test_mapping_fails_as_a_handle_would() -> None:
    device = faulty_device(make_device("cpu:0"), Plan(device=(Rule(call="map", what="fail"),)))
    with pytest.raises(HandleError, match="injected into map"):
        device.map(())


def test_copies_raise_as_a_library_would() -> None:
    rule = Rule(call="bind_thread", what="drop")
    device = faulty_device(make_device("cpu:0"), Plan(device=(rule,)))
    with pytest.raises(InjectedFault, match="bind_thread"):
        device.bind_thread()


def test_a_call_that_devices_do_not_have() -> None:
    with pytest.raises(ConfigError, match="no call 'copy_up'"):
        faulty_device(make_device("cpu:0"), Plan(device=(Rule(call="copy_up", what="fail"),)))
