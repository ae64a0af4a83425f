from typing import Any

import pytest

from kvcommon.messages import StoreState
from kvworker.core.commands import (
    CloseGets,
    ClosePuts,
    FindKeys,
    LoadLayers,
    MapEngine,
    OpenGets,
    OpenPuts,
    ProbeStore,
    ResetNamespace,
    UnmapEngine,
    WorkCommand,
    WriteLayers,
)
from kvworker.core.events import (
    EngineMapped,
    EngineUnmapped,
    GetsClosed,
    GetsOpened,
    KeysFound,
    LayersLoaded,
    LayersWritten,
    PutsClosed,
    PutsOpened,
    StoreProbed,
    StoreReset,
    WorkerEvent,
)
from kvworker.outcome import Outcome
from kvworker.transfer.job import Job, unperformed
from tests.kvworker.devices.layouts import one_storage
from tests.kvworker.transfer.rig import Model

KEYS = ("a", "b")
LOST = (Outcome.CANCELLED,) * 2
DOWN = (Outcome.DOWN,) * 2


def test_every_command_has_its_own_refusal() -> None:
    model = Model(one_storage(), 1)
    some: dict[str, Any] = {"engine": "e", "step": 1, "group": 0, "keys": KEYS}
    layers: dict[str, Any] = {**some, "block_ids": (1, 2), "first_layer": 0, "end_layer": 2}
    pairs: list[tuple[WorkCommand, WorkerEvent]] = [
        (
            MapEngine(op=1, engine="e", attach=model.attach()),
            EngineMapped(now_ns=9, op=1, engine="e", error="why"),
        ),
        (UnmapEngine(op=2, engine="e"), EngineUnmapped(now_ns=9, op=2, engine="e")),
        (FindKeys(op=3, engine="e", keys=KEYS), KeysFound(now_ns=9, op=3, outcomes=DOWN)),
        (OpenPuts(op=4, **some), PutsOpened(now_ns=9, op=4, outcomes=LOST)),
        (
            WriteLayers(op=5, **layers),
            LayersWritten(now_ns=9, op=5, outcomes=LOST, num_bytes=(0, 0)),
        ),
        (
            ClosePuts(op=6, engine="e", step=1, end=KEYS, revoke=("c",)),
            PutsClosed(now_ns=9, op=6, ended=LOST, revoked=LOST[:1]),
        ),
        (OpenGets(op=7, **some), GetsOpened(now_ns=9, op=7, outcomes=LOST)),
        (LoadLayers(op=8, **layers), LayersLoaded(now_ns=9, op=8, outcomes=LOST, num_bytes=0)),
        (CloseGets(op=9, engine="e", keys=KEYS), GetsClosed(now_ns=9, op=9)),
        (ResetNamespace(op=10, prefixes=("p",)), StoreReset(now_ns=9, op=10)),
        (
            ProbeStore(op=11),
            StoreProbed(now_ns=9, op=11, state=StoreState.DOWN, reason="why"),
        ),
    ]
    for command, event in pairs:
        assert unperformed(command, Outcome.CANCELLED, "why", 9) == event
    model.close()


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_job_without_an_engine_is_unwanted(cancelled: bool) -> None:
    job = Job(FindKeys(op=1, engine="e", keys=()), None)
    job.cancelled = cancelled
    assert job.unwanted
