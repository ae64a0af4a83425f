import pytest

from kvcommon.errors import ConfigError
from kvworker.devices.cpu import CpuDevice
from kvworker.devices.factory import make_device


def test_a_cpu_device_is_made() -> None:
    device = make_device("cpu:3")
    assert isinstance(device, CpuDevice)
    assert device.name == "cpu:3"
    assert device.direct


@pytest.mark.parametrize("name", ["npu:0", "cuda:1"])
def test_kinds_without_an_adapter_are_named_as_such(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no adapter for it yet; supported: cpu:<n>"):
        make_device(name)


@pytest.mark.parametrize("name", ["", "tpu:0", "CPU:0", ":0"])
def test_unknown_kinds_are_refused_with_what_is_supported(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown kind; supported: cpu:<n>"):
        make_device(name)


@pytest.mark.parametrize("name", ["cpu", "cpu:", "cpu:x", "cpu:-1", "cpu:1:2", "cpu:²"])
def test_a_device_needs_its_number(name: str) -> None:
    with pytest.raises(ConfigError, match="number is missing"):
        make_device(name)
