"""The one place that knows which device adapters exist. Each is loaded when it is asked for."""

from collections.abc import Callable

from kvcommon.errors import ConfigError
from kvworker.devices.base import Device


def _cpu(name: str) -> Device:
    from kvworker.devices.cpu import CpuDevice

    return CpuDevice(name)


def _npu(name: str) -> Device:
    from kvworker.devices.npu import open_npu

    return open_npu(name)


def _cuda(name: str) -> Device:
    from kvworker.devices.cuda import open_cuda

    return open_cuda(name)


#: Adapters by the kind in a device's name.
_ADAPTERS: dict[str, Callable[[str], Device]] = {"cpu": _cpu, "cuda": _cuda, "npu": _npu}


def make_device(name: str) -> Device:
    """Open a device, for example ``cpu:0`` or ``npu:3``; the number is the card's physical one.

    Raises:
        ConfigError: no device name, an unknown kind, or a device whose software or card is missing.
    """
    kind, colon, index = name.partition(":")
    supported = ", ".join(f"{kind}:<n>" for kind in sorted(_ADAPTERS))
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        raise ConfigError(f"device {name!r}: unknown kind; supported: {supported}")
    if not colon or not (index.isascii() and index.isdigit()):
        raise ConfigError(f"device {name!r}: the number is missing; supported: {supported}")
    return adapter(name)
