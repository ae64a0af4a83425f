"""Mooncake's transport ``ascend``: the real NPU wheel, over the double."""

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcommon.config import MooncakeConfig
from kvcommon.errors import StoreError
from kvworker.devices.acl import AclDriver
from kvworker.devices.driver import Direction
from kvworker.devices.npu import open_npu
from kvworker.devices.torch_device import TorchDevice
from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO
from kvworker.stores.mooncake import MooncakeStore
from kvworker.stores.mooncake_ascend import MAX_REGISTRATIONS
from localmaster import LocalMaster
from tests.npu.rig import (
    Engine,
    adversarial,
    engine,
    engine_process,
    mapped_segments,
    npu_daemon,
)
from tests.npu.test_daemon import BLOCKS, round_trip
from tests.support.daemonproc import DaemonProcess

MIB = 1 << 20


@pytest.fixture(scope="module")
def master() -> Iterator[LocalMaster]:
    with LocalMaster() as made:
        yield made


@pytest.fixture(scope="module")
def device() -> TorchDevice:
    return open_npu("npu:0")


@pytest.fixture
def store(master: LocalMaster, device: TorchDevice) -> Iterator[MooncakeStore]:
    config = MooncakeConfig(
        master_server_address=master.address, global_segment_size=64 * MIB, protocol="ascend"
    )
    made = MooncakeStore(config, bind=device.bind_thread)
    made.open()
    yield made
    made.close()


def fill(driver: AclDriver, address: int, data: bytes) -> None:
    source = ctypes.create_string_buffer(data, len(data))
    driver.copy_now(address, ctypes.addressof(source), len(data), Direction.TO_DEVICE)


def content(driver: AclDriver, address: int, size: int) -> bytes:
    target = ctypes.create_string_buffer(size)
    driver.copy_now(ctypes.addressof(target), address, size, Direction.FROM_DEVICE)
    return target.raw


def test_objects_move_from_and_to_the_devices_own_memory(
    store: MooncakeStore, device: TorchDevice
) -> None:
    assert store.device_memory
    staging = device.allocate_staging(4 * MIB, on_device=True)
    driver = device._driver
    assert isinstance(driver, AclDriver)
    assert store.register(staging.address, staging.num_bytes, staging.location)
    fill(driver, staging.address, bytes(range(256)) * 32)
    key = "ascend-key"
    assert store.put_start([key], [8192]) == [Outcome.OK]
    halves = RangeIO(key, (staging.address + 4096, staging.address), (4096, 4096), (4096, 0))
    assert store.put_ranges([halves]) == [Outcome.OK]
    assert store.put_end([key]) == [Outcome.OK]
    assert store.get_start([key]) == [Outcome.OK]
    back = staging.address + MIB
    assert store.get_ranges([RangeIO(key, (back,), (8192,), (0,))]) == [Outcome.OK]
    assert content(driver, back, 8192) == bytes(range(256)) * 32
    store.get_end([key])
    store.unregister(staging.address)
    staging.close()


def test_registration_has_its_limits(store: MooncakeStore, device: TorchDevice) -> None:
    size = 4096
    staging = device.allocate_staging(4 * MIB, on_device=True)
    assert not store.register(staging.address + size, size, staging.location), "not on 2 MiB"
    memory = device.allocate_staging(2 * MAX_REGISTRATIONS * size, on_device=False)
    taken = [
        store.register(memory.address + index * 2 * size, size, memory.location)
        for index in range(MAX_REGISTRATIONS)
    ]
    # One region or more is the store's own.
    assert sum(taken) >= MAX_REGISTRATIONS - 8
    assert not store.register(staging.address, size, staging.location)
    for index, ok in enumerate(taken):
        if ok:
            store.unregister(memory.address + index * 2 * size)
    assert store.register(staging.address, size, staging.location)
    store.unregister(staging.address)
    memory.close()
    staging.close()


def test_a_thread_without_the_card_can_register(store: MooncakeStore, device: TorchDevice) -> None:
    """The mutant: the library asked from such a thread without ``bind``."""
    staging = device.allocate_staging(4 * MIB, on_device=True)
    assert store._ascend is not None
    raw: Any = store._ascend._engine
    answers: list[object] = []

    def unbound() -> None:
        answers.append(raw.register_memory(staging.address, 4096, "npu"))
        answers.append(store.register(staging.address, 4096, "npu"))

    thread = threading.Thread(target=unbound)
    thread.start()
    thread.join()
    assert answers[0] != 0
    assert answers[1] is True
    store.unregister(staging.address)
    staging.close()


def test_a_place_left_to_the_library_to_guess_is_caught(
    store: MooncakeStore, device: TorchDevice
) -> None:
    staging = device.allocate_staging(4 * MIB, on_device=True)
    assert store._ascend is not None
    raw: Any = store._ascend._engine
    assert raw.register_memory(staging.address, 4096, "*") != 0
    assert raw.register_memory(staging.address, 4096, "npu") == 0
    raw.unregister_memory(staging.address)
    staging.close()


def test_a_lease_shorter_than_a_transfer_is_refused(
    master: LocalMaster, device: TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_TRANSFER_TIMEOUT", "20000")
    config = MooncakeConfig(master_server_address=master.address, protocol="ascend")
    with pytest.raises(StoreError, match=r"--default_kv_lease_ttl"):
        MooncakeStore(config, bind=device.bind_thread).open()


def config_file(folder: Path, master: LocalMaster, protocol: str) -> Path:
    path = folder / f"{protocol}.json"
    settings = {
        "master_server_address": master.address,
        "global_segment_size": "64MB",
        "protocol": protocol,
    }
    path.write_bytes(msgspec.json.encode(settings))
    return path


@pytest.mark.parametrize("protocol", ["ascend", "tcp"])
def test_the_whole_daemon_over_mooncake(protocol: str, master: LocalMaster, tmp_path: Path) -> None:
    options = ("--store", "mooncake", "--mooncake-config")
    path = str(config_file(tmp_path, master, protocol))
    with (
        adversarial(seed=21),
        npu_daemon(*options, path) as left,
        npu_daemon(*options, path, number=1) as right,
        engine_process() as first,
        engine_process(1) as second,
    ):
        with engine(left, "gqa", first, name=f"a-{protocol}") as one:
            one.attach()
            round_trip(one, seed=60)
        if protocol == "ascend":
            other_card_reads_it(right, second, one)
        with engine(right, "mla", second, name=f"b-{protocol}") as two:
            two.attach()
            round_trip(two, seed=61)


def other_card_reads_it(right: DaemonProcess, process: Any, saved: Engine) -> None:
    """What a daemon of another card stored comes over the wire."""
    with engine(right, "gqa", process, name="reader") as reader:
        reader.attach()
        assert reader.fingerprint == saved.fingerprint
        assert reader.hits(1, 60, BLOCKS) == 4
        seen, _ = reader.load(1, 60, BLOCKS, [8, 9, 4, 5])
        assert seen == [saved.content(60, block) for block in BLOCKS]


@pytest.mark.parametrize(("protocol", "copying"), [("ascend", "direct"), ("tcp", "staging")])
def test_the_store_reaches_the_engines_memory_itself_if_it_is_asked_to_and_can(
    protocol: str, copying: str, master: LocalMaster, tmp_path: Path
) -> None:
    path = str(config_file(tmp_path, master, protocol))
    with (
        adversarial(seed=22),
        npu_daemon("--store", "mooncake", "--mooncake-config", path, "--direct") as served,
        engine_process() as process,
    ):
        # Its own staging memory.
        before = mapped_segments(served.pid)
        for cache in ("gqa", "strided"):
            with engine(served, cache, process, name=f"direct-{protocol}-{cache}") as one:
                assert set(one.attach()) == {copying, "events"}
                round_trip(one, seed=70)
        assert mapped_segments(served.pid) == before
