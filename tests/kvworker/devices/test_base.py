import pytest

from kvcommon.errors import HandleError
from kvcommon.memory.handles import LocalHandle, MemoryProof
from kvworker.devices.base import HOST_ALIGNMENT, HostStaging
from kvworker.devices.cpu import CpuDevice


def test_host_staging_is_aligned_and_closes_twice() -> None:
    staging = HostStaging(1000)
    assert staging.address % HOST_ALIGNMENT == 0
    assert (staging.num_bytes, staging.location) == (1000, "cpu")
    staging.close()


def test_a_device_without_events_and_proofs_says_so() -> None:
    device = CpuDevice("cpu:0")
    mapping = device.map([])
    device.wait(mapping, b"")
    with pytest.raises(HandleError, match="cpu:0 has no events"):
        device.wait(mapping, b"event")
    proof = MemoryProof(storage=LocalHandle(address=1, size=1), nonce=7)
    with pytest.raises(HandleError, match="start the daemon with the engine's device"):
        device.prove(proof)
    assert device.allocate_staging(10, on_device=True).location == "cpu"
