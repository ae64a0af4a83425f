"""The one place that knows which device adapters exist."""

from collections.abc import Callable

from kvcommon.errors import ConfigError
from kvworker.devices.base import Device
from kvworker.devices.cpu import CpuDevice

#: Adapters of this build, by the kind in a device's name.
_ADAPTERS: dict[str, Callable[[str], Device]] = {"cpu": CpuDevice}
#: Kinds that vLLM knows and this build cannot serve.
_WITHOUT_ADAPTER = ("npu", "cuda")


def make_device(name: str) -> Device:
    """Make the adapter of a device, for example ``cpu:0``.

    Raises:
        ConfigError: no device name, or a kind that this build cannot serve; says which it can.
    """
    kind, colon, index = name.partition(":")
    supported = ", ".join(f"{kind}:<n>" for kind in sorted(_ADAPTERS))
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        why = "this build has no adapter for it yet" if kind in _WITHOUT_ADAPTER else "unknown kind"
        raise ConfigError(f"device {name!r}: {why}; supported: {supported}")
    if not colon or not (index.isascii() and index.isdigit()):
        raise ConfigError(f"device {name!r}: the number is missing; supported: {supported}")
    return adapter(name)
