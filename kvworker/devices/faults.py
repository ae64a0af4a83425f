"""Faults in a device, as a plan says (``kvworker.faults``)."""

from collections.abc import Callable
from typing import Any

from kvcommon.errors import HandleError
from kvworker.devices.base import Device
from kvworker.faults import Plan, Rule, inject


class InjectedFault(RuntimeError):
    """What a device's library might raise."""


def faulty_device(device: Device, plan: Plan) -> Device:
    """Put the plan's faults into a device. Returns it.

    Raises:
        ConfigError: a rule names no call of a device.
    """
    return inject(device, plan.device, plan.seed, _fault)


def _fault(rule: Rule, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:  # noqa: ANN401
    if rule.call == "map":
        raise HandleError("a fault was injected into map", "take the fault out of the plan")
    if rule.what in {"drop", "truncate"}:
        method(*args)
    raise InjectedFault(f"a fault was injected into {rule.call}")
