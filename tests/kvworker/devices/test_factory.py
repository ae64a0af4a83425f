import sys

import pytest

from kvcommon.errors import ConfigError
from kvworker.devices.cpu import CpuDevice
from kvworker.devices.factory import make_device


def test_a_cpu_device_is_made() -> None:
    device = make_device("cpu:3")
    assert isinstance(device, CpuDevice)
    assert device.name == "cpu:3"
    assert device.direct


@pytest.mark.parametrize(("name", "missing"), [("npu:0", "torch_npu"), ("cuda:1", "torch")])
def test_a_device_whose_software_is_missing_says_which_extra_to_install(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a machine without it, whatever this one has.
    monkeypatch.setitem(sys.modules, missing, None)
    kind = name.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"device {name}: .*pip install 'kvferry\[{kind}\]'"):
        make_device(name)


@pytest.mark.parametrize("name", ["", "tpu:0", "CPU:0", ":0"])
def test_unknown_kinds_are_refused_with_what_is_supported(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown kind; supported: cpu:<n>, cuda:<n>, npu:<n>"):
        make_device(name)


@pytest.mark.parametrize("name", ["cpu", "cpu:", "cpu:x", "cpu:-1", "cpu:1:2", "cpu:²"])
def test_a_device_needs_its_number(name: str) -> None:
    with pytest.raises(ConfigError, match="number is missing"):
        make_device(name)
