"""Faults that the device suite must catch, made on purpose.

``*_right`` are what the suite demands, in one call; a mutant is caught if they say False. Where a
fault is a race, the device is held back until the faulty code has run: it loses every time.
"""

import ctypes
import os
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvcommon.errors import HandleError
from kvcommon.layout import CacheLayout
from kvcommon.memory.torch_ipc import import_storages, release_storages
from kvworker.devices.acl import LIBRARY, AclDriver
from kvworker.devices.base import Mapping, Packed
from kvworker.devices.driver import Library
from kvworker.devices.npu import open_npu
from kvworker.devices.torch_device import TorchDevice
from tests.conformance.devices.memory import DeviceMemory, DeviceProcess, contents
from tests.kvworker.devices.layouts import NUM_LAYERS, block_in, two_planes

BLOCKS = [5, 1, 2, 6]
SEEDS = range(1, 6)


@pytest.fixture(scope="module", autouse=True)
def slow_device() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(CANN_DOUBLE_DELAY_US="4000", CANN_DOUBLE_LAUNCH_US="1000")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def process(slow_device: None) -> Iterator[DeviceProcess]:
    made = DeviceProcess("tests.conformance.devices.exporter_main", "npu:0")
    yield made
    made.close()


@pytest.fixture(scope="module")
def device(process: DeviceProcess) -> TorchDevice:
    # After the other process: it sets variables for this one that are not for an engine.
    made = open_npu("npu:0")
    made.bind_thread()
    return made


@pytest.fixture
def memory(process: DeviceProcess) -> Iterator[DeviceMemory]:
    made = DeviceMemory(process, two_planes(), 1)
    yield made
    made.close()


@pytest.fixture
def mapping(device: TorchDevice, memory: DeviceMemory) -> Iterator[Mapping]:
    made = device.map(memory.handles())
    yield made
    made.close()


def hosts_of(layout: CacheLayout) -> tuple["ctypes.Array[ctypes.c_char]", list[int]]:
    size = layout.groups[0].object_bytes
    buffer = ctypes.create_string_buffer(len(BLOCKS) * size)
    return buffer, [ctypes.addressof(buffer) + index * size for index in range(len(BLOCKS))]


def save_right(
    device: TorchDevice, memory: DeviceMemory, mapping: Mapping, seed: int, queue: str = "queue"
) -> bool:
    """What the engine queued before its event is what is saved."""
    new = contents(memory.layout, seed)
    event = memory.process.ask(queue, new)
    buffer, hosts = hosts_of(memory.layout)
    device.wait(mapping, event)
    device.copy_out(mapping, memory.layout.groups[0], range(NUM_LAYERS), BLOCKS, hosts)
    memory.process.ask("hold", 0, 0)
    return buffer.raw == b"".join(block_in(memory.layout, new, block) for block in BLOCKS)


def load_right(device: TorchDevice, memory: DeviceMemory, mapping: Mapping, seed: int) -> bool:
    """What is loaded comes after what the engine queued before its event."""
    old, new = contents(memory.layout, seed), contents(memory.layout, 100 + seed)
    buffer, hosts = hosts_of(memory.layout)
    buffer.raw = b"".join(block_in(memory.layout, new, block) for block in BLOCKS)
    event = memory.queue(old)
    device.wait(mapping, event)
    device.copy_in(mapping, memory.layout.groups[0], range(NUM_LAYERS), BLOCKS, hosts)
    memory.process.ask("hold", 0, 0)
    after = memory.everything()
    return all(
        block_in(memory.layout, after, block) == block_in(memory.layout, new, block)
        for block in BLOCKS
    )


def staging_right(device: TorchDevice, memory: DeviceMemory, mapping: Mapping, seed: int) -> bool:
    """A slot that is used again holds what was copied into it last."""
    group = memory.layout.groups[0]
    memory.overwrite(contents(memory.layout, seed))
    before = memory.everything()
    staging = device.allocate_staging(group.object_bytes, on_device=False)
    seen = []
    for block in BLOCKS:
        packed = Packed(staging.address, 1, [block], [0])
        device.gather(mapping, group, range(NUM_LAYERS), packed)
        seen.append(ctypes.string_at(staging.address, group.object_bytes))
    hold_our_streams(0)
    # A mutant has left copies under way.
    Library(LIBRARY).call("aclrtSynchronizeStream", ctypes.c_void_p(device._stream))
    staging.close()
    return seen == [block_in(memory.layout, before, block) for block in BLOCKS]


def hold_our_streams(held: int) -> None:
    ctypes.CDLL(LIBRARY).cann_double_hold(held, 0)


Check = Callable[[TorchDevice, DeviceMemory, Mapping, int], bool]


@pytest.mark.parametrize("check", [save_right, load_right, staging_right])
def test_without_a_mutant_all_is_right(
    check: Check, device: TorchDevice, memory: DeviceMemory, mapping: Mapping
) -> None:
    assert all(check(device, memory, mapping, seed) for seed in SEEDS)


@pytest.mark.parametrize("check", [save_right, load_right])
def test_a_missing_wait_is_caught(
    check: Check,
    device: TorchDevice,
    memory: DeviceMemory,
    mapping: Mapping,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchDevice, "wait", lambda *_: None)
    memory.process.ask("hold", 1, 0)
    assert not check(device, memory, mapping, 2)


def test_staging_used_again_too_early_is_caught(
    device: TorchDevice,
    memory: DeviceMemory,
    mapping: Mapping,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AclDriver, "synchronize", lambda *_: None)
    hold_our_streams(1)
    assert not staging_right(device, memory, mapping, 2)


@pytest.mark.parametrize("queue", ["queue_early", "queue_stale"])
def test_an_event_that_means_something_else_is_caught(
    queue: str, device: TorchDevice, memory: DeviceMemory, mapping: Mapping
) -> None:
    """Sent before its record has left torch's queue, or the one of an earlier step."""
    assert not save_right(device, memory, mapping, 2, queue)


def test_the_offset_of_a_plane_counts(
    device: TorchDevice, memory: DeviceMemory, mapping: Mapping
) -> None:
    group = memory.layout.groups[0]
    layers = tuple(
        msgspec.structs.replace(
            layer,
            planes=tuple(msgspec.structs.replace(plane, offset=0) for plane in layer.planes),
        )
        for layer in group.layers
    )
    mutant = msgspec.structs.replace(group, layers=layers)
    buffer, hosts = hosts_of(memory.layout)
    device.copy_out(mapping, mutant, range(NUM_LAYERS), BLOCKS, hosts)
    assert buffer.raw != b"".join(memory.block(block) for block in BLOCKS)


def test_a_handle_is_imported_once(device: TorchDevice, process: DeviceProcess) -> None:
    """Twice, and the exporter can never give the memory back: so the device refuses it."""
    layout = two_planes()
    size = 64 << 20
    big = msgspec.structs.replace(layout, storage_bytes=(size,))
    memory = DeviceMemory(process, big, 1)
    (handle,) = memory.handles()
    with pytest.raises(HandleError, match="named twice"):
        device.map([handle, handle])
    device.map([handle]).close()
    memory.close()
    free = process.ask("free_bytes")

    memory = DeviceMemory(process, big, 1)
    (handle,) = memory.handles()
    for _ in range(2):
        # What the device does after its checks.
        release_storages(device._family, import_storages(device._family, 0, [handle]))  # type: ignore[list-item]
    memory.close()
    assert process.ask("free_bytes") <= free - size, "the double import went unnoticed"
