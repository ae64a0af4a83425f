"""Inline mode on a device: addresses of this process, and the host waits for the device."""

import ctypes

import pytest
import torch

from kvcommon.memory.export import LocalExporter, make_exporter
from kvworker.devices.npu import open_npu
from tests.conformance.devices.memory import contents
from tests.kvworker.devices.layouts import NUM_LAYERS, block_in, storage_per_layer


def test_a_daemon_in_the_engines_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANN_DOUBLE_DELAY_US", "3000")
    device = open_npu("npu:0")
    device.bind_thread()
    layout = storage_per_layer()
    tensors = [
        torch.empty(size, dtype=torch.uint8, device="npu:0") for size in layout.storage_bytes
    ]
    exporter = make_exporter([each.untyped_storage() for each in tensors], inline=True)
    assert isinstance(exporter, LocalExporter)
    assert exporter.device == "npu:0"
    exporter.prepare()
    mapping = device.map(exporter.handles())
    clock = exporter.clock(4)
    assert clock is not None
    group = layout.groups[0]
    buffer = ctypes.create_string_buffer(group.object_bytes)
    for seed in range(3):
        new = contents(layout, seed)
        pinned = [torch.frombuffer(bytearray(each), dtype=torch.uint8).pin_memory() for each in new]
        for tensor, source in zip(tensors, pinned, strict=True):
            tensor.copy_(source, non_blocking=True)
        assert clock.settle(clock.stamp(), shared=True) == b""
        hosts = [ctypes.addressof(buffer)]
        device.copy_out(mapping, group, range(NUM_LAYERS), [3], hosts)
        assert buffer.raw == block_in(layout, new, 3)
    mapping.close()
