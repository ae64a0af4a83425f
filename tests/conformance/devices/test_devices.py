"""What every device adapter must do. ``memory.kinds`` names the devices that are held to it."""

import ctypes
import threading
from typing import Any

import msgspec
import pytest

from kvcommon.errors import HandleError
from kvcommon.memory.handles import FileHandle, LocalHandle
from kvworker.devices.base import Device, Mapping, Packed
from tests.conformance.devices.memory import KvMemory, contents
from tests.kvworker.devices.layouts import NUM_BLOCKS, NUM_LAYERS, block_in

BLOCKS = [5, 1, 2, 6]


def objects(cache: KvMemory, count: int) -> tuple[ctypes.Array[ctypes.c_char], list[int]]:
    """Host memory for objects, back to back."""
    size = cache.layout.groups[0].object_bytes
    memory = ctypes.create_string_buffer(count * size)
    return memory, [ctypes.addressof(memory) + index * size for index in range(count)]


def test_a_device_has_a_name_with_a_number(device: Device) -> None:
    kind, _, number = device.name.partition(":")
    assert kind
    assert number.isdigit()


def test_the_mapping_has_the_storages_in_order(cache: KvMemory, mapping: Mapping) -> None:
    assert tuple(storage.size for storage in mapping.storages) == cache.layout.storage_bytes


def test_copy_out_gathers_blocks_as_objects(
    device: Device, cache: KvMemory, mapping: Mapping
) -> None:
    memory, hosts = objects(cache, len(BLOCKS))
    device.copy_out(mapping, cache.layout.groups[0], range(NUM_LAYERS), BLOCKS, hosts)
    assert memory.raw == b"".join(cache.block(block) for block in BLOCKS)


def test_copy_in_scatters_objects_and_touches_nothing_else(
    device: Device, cache: KvMemory, mapping: Mapping
) -> None:
    source = contents(cache.layout, 2)
    before = cache.everything()
    memory, hosts = objects(cache, len(BLOCKS))
    memory.raw = b"".join(block_in(cache.layout, source, block) for block in BLOCKS)
    device.copy_in(mapping, cache.layout.groups[0], range(NUM_LAYERS), BLOCKS, hosts)
    after = cache.everything()
    for block in BLOCKS:
        assert block_in(cache.layout, after, block) == block_in(cache.layout, source, block)
    # Put the old bytes back: then every byte of every storage is what it was.
    memory.raw = b"".join(block_in(cache.layout, before, block) for block in BLOCKS)
    device.copy_in(mapping, cache.layout.groups[0], range(NUM_LAYERS), BLOCKS, hosts)
    assert cache.everything() == before


@pytest.mark.parametrize("layers", [range(1), range(1, 3), range(NUM_LAYERS - 1, NUM_LAYERS)])
def test_layers_are_copied_alone(
    device: Device, cache: KvMemory, mapping: Mapping, layers: range
) -> None:
    source = contents(cache.layout, 2)
    before = cache.everything()
    memory, hosts = objects(cache, len(BLOCKS))
    memory.raw = b"".join(block_in(cache.layout, source, block) for block in BLOCKS)
    device.copy_in(mapping, cache.layout.groups[0], layers, BLOCKS, hosts)
    after = cache.everything()
    for block in range(NUM_BLOCKS):
        for layer in range(NUM_LAYERS):
            one = range(layer, layer + 1)
            loaded = block in BLOCKS and layer in layers
            want = block_in(cache.layout, source if loaded else before, block, one)
            assert block_in(cache.layout, after, block, one) == want


def test_what_copy_in_wrote_is_there_for_another_thread_when_it_returns(
    device: Device, cache: KvMemory, mapping: Mapping
) -> None:
    memory, hosts = objects(cache, 1)
    ctypes.memset(memory, 0xAB, len(memory))
    seen: list[bytes] = []
    device.copy_in(mapping, cache.layout.groups[0], range(NUM_LAYERS), [3], hosts)
    thread = threading.Thread(target=lambda: seen.append(cache.block(3)))
    thread.start()
    thread.join()
    assert seen == [memory.raw]


def test_nothing_to_copy_is_fine(device: Device, cache: KvMemory, mapping: Mapping) -> None:
    before = cache.everything()
    device.copy_in(mapping, cache.layout.groups[0], range(1), [], [])
    device.copy_out(mapping, cache.layout.groups[0], range(1), [], [])
    assert cache.everything() == before


def test_closing_twice_is_fine(device: Device, cache: KvMemory) -> None:
    mapping = device.map(cache.handles())
    mapping.close()
    mapping.close()


def test_a_handle_of_something_else_is_refused(device: Device, cache: KvMemory) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "file": {"st_ino": 1},
        "npu": {"handle": b"x"},
        "cuda": {"handle": b"x"},
    }
    handles = cache.handles()
    bad = [msgspec.structs.replace(handle, **wrong[tag(handle)]) for handle in handles]
    with pytest.raises(HandleError):
        device.map(bad)
    stranger = LocalHandle(address=4096, size=cache.layout.storage_bytes[0], pid=1)
    with pytest.raises(HandleError):
        device.map([stranger])
    other = FileHandle(pid=1, fd=0, size=1, st_dev=1, st_ino=1)
    with pytest.raises(HandleError):
        device.map([other])


def tag(handle: msgspec.Struct) -> str:
    return str(msgspec.to_builtins(handle, builtin_types=(bytes,))["type"])


def test_two_mappings_of_the_same_memory_see_each_other(
    device: Device, cache: KvMemory, mapping: Mapping
) -> None:
    group = cache.layout.groups[0]
    second = device.map(cache.handles())
    memory, hosts = objects(cache, 1)
    ctypes.memset(memory, 0x5A, len(memory))
    device.copy_in(second, group, range(NUM_LAYERS), [4], hosts)
    out, out_hosts = objects(cache, 1)
    device.copy_out(mapping, group, range(NUM_LAYERS), [4], out_hosts)
    assert out.raw == memory.raw
    second.close()


def test_what_the_engine_queued_is_there_after_its_event(
    device: Device, cache: KvMemory, mapping: Mapping
) -> None:
    group = cache.layout.groups[0]
    for seed in range(3, 8):
        new = contents(cache.layout, seed)
        event = cache.queue(new)
        memory, hosts = objects(cache, len(BLOCKS))
        device.wait(mapping, event)
        device.copy_out(mapping, group, range(NUM_LAYERS), BLOCKS, hosts)
        assert memory.raw == b"".join(block_in(cache.layout, new, block) for block in BLOCKS)


def test_what_is_loaded_comes_after_what_the_engine_queued_before(
    device: Device, cache: KvMemory, mapping: Mapping
) -> None:
    group = cache.layout.groups[0]
    for seed in range(3, 8):
        old, new = contents(cache.layout, seed), contents(cache.layout, 100 + seed)
        memory, hosts = objects(cache, len(BLOCKS))
        memory.raw = b"".join(block_in(cache.layout, new, block) for block in BLOCKS)
        event = cache.queue(old)
        device.wait(mapping, event)
        device.copy_in(mapping, group, range(NUM_LAYERS), BLOCKS, hosts)
        after = cache.everything()
        for block in range(NUM_BLOCKS):
            want = block_in(cache.layout, new if block in BLOCKS else old, block)
            assert block_in(cache.layout, after, block) == want


@pytest.mark.parametrize("on_device", [False, True])
def test_staging_holds_objects_between_the_copies(
    device: Device, cache: KvMemory, mapping: Mapping, on_device: bool
) -> None:
    group = cache.layout.groups[0]
    staging = device.allocate_staging(4 * group.object_bytes, on_device=on_device)
    for layers in (range(NUM_LAYERS), range(1, 3)):
        before = cache.everything()
        full = Packed(staging.address, 4, [1, 2, 3, 4], range(4))
        device.gather(mapping, group, layers, full)
        # The third has not arrived.
        some = Packed(staging.address, 4, [4, 3, 6], [0, 1, 3])
        device.scatter(mapping, group, layers, some)
        after = cache.everything()
        moved = {4: 1, 3: 2, 6: 4}
        for block in range(NUM_BLOCKS):
            for layer in range(NUM_LAYERS):
                one = range(layer, layer + 1)
                source = moved.get(block, block) if layer in layers else block
                want = block_in(cache.layout, before, source, one)
                assert block_in(cache.layout, after, block, one) == want
    staging.close()
    staging.close()


def test_a_proof_is_read_and_answered(device: Device, cache: KvMemory) -> None:
    proof = cache.proof()
    if proof is None:
        assert device.direct
        return
    assert device.prove(proof)
    assert cache.proven()


def test_a_false_proof_is_refused(device: Device, cache: KvMemory) -> None:
    proof = cache.proof()
    if proof is not None:
        with pytest.raises(HandleError, match="not what this daemon reads there"):
            device.prove(msgspec.structs.replace(proof, nonce=proof.nonce ^ 1))
        assert not cache.proven()
