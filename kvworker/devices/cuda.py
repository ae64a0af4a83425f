"""A CUDA device."""

from kvcommon.memory.cuda import FAMILY
from kvworker.devices.cudart import CudaDriver
from kvworker.devices.torch_device import TorchDevice


def open_cuda(name: str) -> TorchDevice:
    """Open a CUDA device by its physical number.

    Raises:
        ConfigError: torch, the CUDA runtime or the card is missing.
    """
    device = TorchDevice(name, FAMILY, CudaDriver)
    device.open()
    return device
