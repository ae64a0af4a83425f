from collections.abc import Callable, Iterator

import pytest

from kvcommon.layout import CacheLayout
from kvworker.devices.base import Device, Mapping
from kvworker.devices.factory import make_device
from tests.conformance.devices.memory import (
    CpuMemory,
    DeviceMemory,
    DeviceProcess,
    KvMemory,
    kinds,
)
from tests.kvworker.devices.layouts import LAYOUTS

MakeMemory = Callable[[CacheLayout, int], KvMemory]


@pytest.fixture(scope="session", params=kinds())
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def make_memory(kind: str) -> Iterator[MakeMemory]:
    if kind == "cpu":
        yield CpuMemory
        return
    exporter = DeviceProcess("tests.conformance.devices.exporter_main", f"{kind}:0")
    yield lambda layout, seed: DeviceMemory(exporter, layout, seed)
    exporter.close()


@pytest.fixture(scope="session")
def device(kind: str, make_memory: MakeMemory) -> Device:
    # After the other process: a device may set variables that are not for an engine.
    made = make_device(f"{kind}:0")
    made.bind_thread()
    return made


@pytest.fixture(params=LAYOUTS)
def cache(request: pytest.FixtureRequest, make_memory: MakeMemory) -> Iterator[KvMemory]:
    made = make_memory(LAYOUTS[request.param](), 1)
    yield made
    made.close()


@pytest.fixture
def mapping(device: Device, cache: KvMemory) -> Iterator[Mapping]:
    made = device.map(cache.handles())
    yield made
    made.close()
