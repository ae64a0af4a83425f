"""An Ascend NPU as a device."""

import os
import sys

from kvcommon.memory.npu import ALLOC_CONF, FAMILY
from kvworker.devices.acl import AclDriver
from kvworker.devices.torch_device import TorchDevice

#: What the daemon's own torch_npu is told before it is loaded: staging and scratch memory need no
#: expandable segments, and nothing is launched that a queue would make faster.
_ENVIRONMENT = {ALLOC_CONF: "expandable_segments:False", "TASK_QUEUE_ENABLE": "0"}


def open_npu(name: str) -> TorchDevice:
    """Open an NPU by its physical number.

    Raises:
        ConfigError: torch_npu, CANN or the card is missing.
    """
    if "torch_npu" not in sys.modules:
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    device = TorchDevice(name, FAMILY, AclDriver)
    device.open()
    return device
