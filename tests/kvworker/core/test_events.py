"""Events are plain data: what is logged is what the core was told."""

from typing import get_args

import msgspec
import pytest

from kvworker.core.events import KeysFound, LayersWritten, ModelSaid, PeerLost, WorkerEvent
from kvworker.outcome import Outcome
from tests.support.playbook import attach

EVENTS: list[WorkerEvent] = [
    KeysFound(now_ns=1, op=2, outcomes=(Outcome.OK, Outcome.MISS), local=True),
    LayersWritten(now_ns=1, op=2, outcomes=(Outcome.FAILED,), num_bytes=(0,), started_ns=5),
    ModelSaid(now_ns=1, engine="e#0", epoch=2, body=attach()),
    PeerLost(now_ns=1, engine="e#0", role="model", epoch=2, reason="it died"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_the_log(event: WorkerEvent) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=WorkerEvent) == event


def test_every_event_says_when_and_cannot_be_changed() -> None:
    for kind in get_args(WorkerEvent):
        assert kind.__struct_config__.frozen, kind
        assert "now_ns" in kind.__struct_fields__, kind
