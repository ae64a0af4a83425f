"""What vLLM itself carries for us between its processes.

vLLM pickles these objects, so they are plain dataclasses around bytes that msgspec encoded (a
msgspec Struct cannot subclass vLLM's ABCs). Nothing of them reaches a daemon.
"""

from dataclasses import dataclass

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvsched.core.commands import TellModel
from kvsched.ranks import RankInfo

__all__ = [
    "RankHandshake",
    "RankInfo",
    "StepMetadata",
    "StepReport",
    "rank_handshake",
    "read_rank_handshake",
    "read_step_metadata",
    "step_metadata",
]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Metadata of one step; ``payload`` is empty where the model side has nothing to do."""

    step: int
    payload: bytes = b""
    #: The scheduler side has switched itself off: nobody will do the loads, they have failed.
    lost: bool = False


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """One rank's ``RankInfo``, encoded."""

    payload: bytes


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """A rank has run ``step``. Sent only for steps in which it had jobs or failed blocks.

    All ranks get the same metadata, so all of them report the same step.
    """

    step: int
    num_ranks: int = 1

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """Merge the reports of two ranks: the later step counts, earlier ones are implied."""
        if not isinstance(other, StepReport):
            return self
        if other.step == self.step:
            return StepReport(self.step, self.num_ranks + other.num_ranks)
        return self if self.step > other.step else other


_encoder = msgspec.msgpack.Encoder()
_tell_model = msgspec.msgpack.Decoder(TellModel)
_rank_info = msgspec.msgpack.Decoder(RankInfo)


def step_metadata(tell: TellModel, *, lost: bool = False) -> StepMetadata:
    """Wrap what the core says to the model side."""
    return StepMetadata(tell.step, _encoder.encode(tell), lost)


def read_step_metadata(metadata: StepMetadata) -> TellModel:
    """Unwrap it on the model side. ``payload`` must not be empty."""
    return _tell_model.decode(metadata.payload)


def rank_handshake(info: RankInfo) -> RankHandshake:
    """Wrap a rank's introduction."""
    return RankHandshake(_encoder.encode(info))


def read_rank_handshake(metadata: RankHandshake) -> RankInfo:
    """Unwrap it on the scheduler side."""
    return _rank_info.decode(metadata.payload)
