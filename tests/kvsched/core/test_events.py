from typing import get_args

import msgspec
import pytest

from kvsched.core.core import CoreConfig, SchedCore
from kvsched.core.events import Event, SchedEvent, Ticked


@pytest.mark.parametrize("kind", get_args(SchedEvent))
def test_the_core_handles_every_event(kind: type[Event]) -> None:
    assert kind in SchedCore(CoreConfig())._handlers


def test_an_event_survives_the_log() -> None:
    event = Ticked(now_ns=5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=SchedEvent) == event
