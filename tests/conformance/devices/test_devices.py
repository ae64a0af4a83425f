"""What every device adapter must do. Add a maker to ``DEVICES`` to hold an adapter to it."""

import ctypes
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvcommon.errors import HandleError
from kvworker.devices.base import Device, Mapping
from kvworker.devices.factory import make_device
from tests.kvworker.devices.layouts import LAYOUTS, NUM_BLOCKS, NUM_LAYERS, Cache

DEVICES: dict[str, Callable[[], Device]] = {"cpu": lambda: make_device("cpu:0")}

BLOCKS = [5, 1, 2, 6]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    made = DEVICES[request.param]()
    made.bind_thread()
    return made


@pytest.fixture(params=LAYOUTS)
def cache(request: pytest.FixtureRequest) -> Iterator[Cache]:
    made = Cache(LAYOUTS[request.param](), 1)
    yield made
    made.close()


@pytest.fixture
def mapping(device: Device, cache: Cache) -> Iterator[Mapping]:
    made = device.map(cache.handles)
    yield made
    made.close()


def objects(cache: Cache, count: int) -> tuple[ctypes.Array[ctypes.c_char], list[int]]:
    """Host memory for objects, back to back."""
    size = cache.layout.groups[0].object_bytes
    memory = ctypes.create_string_buffer(count * size)
    return memory, [ctypes.addressof(memory) + index * size for index in range(count)]


def test_a_device_has_a_name_with_a_number(device: Device) -> None:
    kind, _, number = device.name.partition(":")
    assert kind
    assert number.isdigit()


def test_the_mapping_has_the_storages_in_order(cache: Cache, mapping: Mapping) -> None:
    assert tuple(storage.size for storage in mapping.storages) == cache.layout.storage_bytes


def test_copy_out_gathers_blocks_as_objects(device: Device, cache: Cache, mapping: Mapping) -> None:
    memory, hosts = objects(cache, len(BLOCKS))
    device.copy_out(mapping, cache.layout.groups[0], range(NUM_LAYERS), BLOCKS, hosts)
    assert memory.raw == b"".join(cache.block(block) for block in BLOCKS)


def test_copy_in_scatters_objects_and_touches_nothing_else(
    device: Device, cache: Cache, mapping: Mapping
) -> None:
    group = cache.layout.groups[0]
    source = Cache(cache.layout, 2)
    memory, hosts = objects(cache, len(BLOCKS))
    memory.raw = b"".join(source.block(block) for block in BLOCKS)
    before = cache.everything()
    device.copy_in(mapping, group, range(NUM_LAYERS), BLOCKS, hosts)
    for block in BLOCKS:
        assert cache.block(block) == source.block(block)
    # Put the old bytes back: then every byte of every storage is what it was.
    for block, old in enumerate(blocks_of(before, cache)):
        if block in BLOCKS:
            held, (host,) = objects(cache, 1)
            held.raw = old
            device.copy_in(mapping, group, range(NUM_LAYERS), [block], [host])
    assert cache.everything() == before
    source.close()


def blocks_of(storages: list[bytes], cache: Cache) -> list[bytes]:
    """The blocks as they were in a snapshot."""
    now = cache.everything()
    for memory, old in zip(cache.memories, storages, strict=True):
        memory[:] = old
    blocks = [cache.block(block) for block in range(NUM_BLOCKS)]
    for memory, new in zip(cache.memories, now, strict=True):
        memory[:] = new
    return blocks


@pytest.mark.parametrize("layers", [range(1), range(1, 3), range(NUM_LAYERS - 1, NUM_LAYERS)])
def test_layers_are_copied_alone(
    device: Device, cache: Cache, mapping: Mapping, layers: range
) -> None:
    group = cache.layout.groups[0]
    source = Cache(cache.layout, 2)
    memory, hosts = objects(cache, len(BLOCKS))
    memory.raw = b"".join(source.block(block) for block in BLOCKS)
    untouched = {
        block: [cache.block(block, range(layer, layer + 1)) for layer in range(NUM_LAYERS)]
        for block in range(NUM_BLOCKS)
    }
    device.copy_in(mapping, group, layers, BLOCKS, hosts)
    for block in range(NUM_BLOCKS):
        for layer in range(NUM_LAYERS):
            got = cache.block(block, range(layer, layer + 1))
            loaded = block in BLOCKS and layer in layers
            want = source.block(block, range(layer, layer + 1))
            assert got == (want if loaded else untouched[block][layer])
    source.close()


def test_what_copy_in_wrote_is_there_for_another_thread_when_it_returns(
    device: Device, cache: Cache, mapping: Mapping
) -> None:
    memory, hosts = objects(cache, 1)
    ctypes.memset(memory, 0xAB, len(memory))
    seen: list[bytes] = []
    device.copy_in(mapping, cache.layout.groups[0], range(NUM_LAYERS), [3], hosts)
    thread = threading.Thread(target=lambda: seen.append(cache.block(3)))
    thread.start()
    thread.join()
    assert seen == [memory.raw]


def test_nothing_to_copy_is_fine(device: Device, cache: Cache, mapping: Mapping) -> None:
    before = cache.everything()
    device.copy_in(mapping, cache.layout.groups[0], range(1), [], [])
    device.copy_out(mapping, cache.layout.groups[0], range(1), [], [])
    assert cache.everything() == before


def test_closing_twice_is_fine(device: Device, cache: Cache) -> None:
    mapping = device.map(cache.handles)
    mapping.close()
    mapping.close()


def test_a_handle_of_something_else_is_refused(device: Device, cache: Cache) -> None:
    bad = [msgspec.structs.replace(handle, st_ino=1) for handle in cache.handles]
    with pytest.raises(HandleError):
        device.map(bad)


def test_two_mappings_of_the_same_memory_see_each_other(
    device: Device, cache: Cache, mapping: Mapping
) -> None:
    group = cache.layout.groups[0]
    second = device.map(cache.handles)
    memory, hosts = objects(cache, 1)
    ctypes.memset(memory, 0x5A, len(memory))
    device.copy_in(second, group, range(NUM_LAYERS), [4], hosts)
    out, out_hosts = objects(cache, 1)
    device.copy_out(mapping, group, range(NUM_LAYERS), [4], out_hosts)
    assert out.raw == memory.raw
    second.close()
