"""What vLLM carries for us: it must survive its pickling."""

import pickle

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvsched.core.commands import ModelLoad, TellModel
from kvsched.metadata import (
    RankHandshake,
    RankInfo,
    StepMetadata,
    StepReport,
    rank_handshake,
    read_rank_handshake,
    read_step_metadata,
    step_metadata,
)

LOAD = ModelLoad(job_id=3, request_id="r", layerwise=True, block_ids=(4, 5))


@pytest.mark.parametrize("lost", [False, True])
def test_a_step_survives_vllms_pickle(lost: bool) -> None:
    tell = TellModel(step=12, loads=(LOAD,), saves=True, cancel=(9,))
    metadata = pickle.loads(pickle.dumps(step_metadata(tell, lost=lost)))
    assert isinstance(metadata, KVConnectorMetadata)
    assert metadata.step == 12
    assert metadata.lost == lost
    assert read_step_metadata(metadata) == tell


def test_a_step_with_nothing_to_do_carries_nothing() -> None:
    assert StepMetadata(7) == StepMetadata(step=7, payload=b"", lost=False)
    with pytest.raises(msgspec.DecodeError):
        read_step_metadata(StepMetadata(7))


def test_a_rank_introduces_itself() -> None:
    info = RankInfo(
        rank=1,
        endpoint="ipc:///run/x.sock",
        device="npu:1",
        fingerprint="f" * 16,
        object_bytes=4096,
        block_size=128,
        num_blocks=100,
    )
    handshake = pickle.loads(pickle.dumps(rank_handshake(info)))
    assert isinstance(handshake, KVConnectorHandshakeMetadata)
    assert read_rank_handshake(handshake) == info
    with pytest.raises(msgspec.ValidationError):
        read_rank_handshake(RankHandshake(msgspec.msgpack.encode({"rank": "one"})))


def test_reports_of_ranks_merge() -> None:
    one, two, later = StepReport(4), StepReport(4), StepReport(5)
    assert isinstance(one, KVConnectorWorkerMetadata)
    assert one.aggregate(two) == StepReport(4, num_ranks=2)
    assert one.aggregate(two).aggregate(StepReport(4)) == StepReport(4, num_ranks=3)
    # The later step implies the earlier ones.
    assert one.aggregate(later) == later
    assert later.aggregate(one) == later


def test_a_report_ignores_what_is_of_another_connector() -> None:
    class Foreign(KVConnectorWorkerMetadata):  # type: ignore[misc] # vLLM is not read
        def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
            return other

    assert StepReport(4).aggregate(Foreign()) == StepReport(4)
