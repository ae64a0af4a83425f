"""Checks of a card: it opens, and shares memory and events with another process."""

from collections.abc import Iterator

from kvcommon.errors import KVFerryError
from kvworker.devices.acl import memory_info
from kvworker.devices.factory import make_device
from kvworker.devices.torch_device import TorchDevice
from kvworker.doctor.probe import share
from kvworker.doctor.report import Finding, Surroundings, fail, ok, warn

_GIB = 1 << 30


def check_card(around: Surroundings) -> Iterator[Finding]:
    """Open the card, look at its memory, and share memory and an event with another process."""
    try:
        device = make_device(around.device)
        device.bind_thread()
        memory = _memory(around.device)
    except KVFerryError as error:
        yield fail("card", str(error), "npu-smi info shows the cards; they are numbered physically")
        return
    yield ok("card", around.device + memory)
    assert isinstance(device, TorchDevice)
    if not any(device.card.uuid):
        remedy = "cards are told apart by number only: give engine and daemon the same cards to see"
        yield warn("uuid", "the driver gives none", remedy)
    else:
        yield ok("uuid", device.card.uuid.hex())
    try:
        events = share(device)
    except KVFerryError as error:
        remedy = (
            "driver 25.3.RC1, CANN 8.3.RC1, one /dev/shm and one user for both; or mode: inline"
        )
        yield fail("sharing memory", str(error), remedy)
        return
    yield ok("sharing memory", "another process's memory was read and written")
    if events:
        yield ok("sharing events", "works")
    else:
        remedy = "Atlas A2 or A3, CANN 8.5, driver 26.0.RC1; without, the engine waits itself"
        yield warn("sharing events", "does not work here", remedy)


def _memory(device: str) -> str:
    if not device.startswith("npu"):
        return ""
    free, total = memory_info()
    return f", {free / _GIB:.2f} of {total / _GIB:.2f} GiB free"
