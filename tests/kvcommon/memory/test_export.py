from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvcommon.errors import HandleError
from kvcommon.memory.cpu import release_storages
from kvcommon.memory.export import CpuExporter, LocalExporter, family_of, make_exporter
from kvcommon.memory.handles import FileHandle


def test_cpu_memory_is_moved_once_and_exported_again_equally() -> None:
    storage = torch.zeros(4096, dtype=torch.uint8).untyped_storage()
    exporter = make_exporter([storage], inline=False)
    assert isinstance(exporter, CpuExporter)
    exporter.prepare()
    address = storage.data_ptr()
    handles = exporter.handles()
    assert exporter.handles() == handles
    assert storage.data_ptr() == address
    assert exporter.device == ""
    assert exporter.proof() is None
    assert exporter.proven()
    assert exporter.clock(10) is None
    release_storages(handle for handle in handles if isinstance(handle, FileHandle))


def test_inline_memory_is_an_address() -> None:
    storage = torch.zeros(4096, dtype=torch.uint8).untyped_storage()
    exporter = make_exporter([storage], inline=True)
    assert isinstance(exporter, LocalExporter)
    exporter.prepare()
    (handle,) = exporter.handles()
    assert getattr(handle, "address", 0) == storage.data_ptr()
    assert exporter.clock(10) is None


def storage_on(device: str) -> Any:
    return cast("Any", SimpleNamespace(device=torch.device(device)))


def test_a_cache_on_two_devices_is_refused() -> None:
    storages = [storage_on("cpu"), storage_on("cuda:0")]
    with pytest.raises(HandleError, match="one device; it lies on: cpu, cuda:0"):
        make_exporter(storages, inline=False)
    with pytest.raises(HandleError, match="none"):
        make_exporter([], inline=False)


def test_devices_are_named_or_refused() -> None:
    assert family_of("cpu") is None
    for kind in ("npu", "cuda"):
        family = family_of(kind)
        assert family is not None
        assert family.kind == kind
    with pytest.raises(HandleError, match="devices are cpu, npu and cuda"):
        family_of("xpu")
