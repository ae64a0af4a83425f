"""What the daemon's core is told. Past tense; plain data; recorded in the event log as they are.

Every command that starts work carries an ``op`` and is answered by exactly one event that quotes
it. ``engine`` is an ``EngineKey``: one rank of one engine.
"""

from typing import Union

import msgspec

from kvcommon.messages import ModelToDaemon, SchedulerToDaemon, StoreState
from kvworker.outcome import Outcome


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of the core's events."""

    #: Monotonic time at which the shell saw it, nanoseconds. The core's only clock.
    now_ns: int


class Ticked(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Time has passed (a few times a second)."""


class ModelSaid(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a model side, in sequence."""

    engine: str
    epoch: int
    body: ModelToDaemon


class SchedulerSaid(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a scheduler side, in sequence."""

    engine: str
    epoch: int
    body: SchedulerToDaemon


class PeerLost(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The process behind a side is gone, or its conversation is broken beyond repair."""

    engine: str
    #: ``model`` or ``scheduler``.
    role: str
    epoch: int
    reason: str


class EngineMapped(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Answers ``MapEngine``. ``error`` is empty on success."""

    op: int
    engine: str
    capabilities: tuple[str, ...] = ()
    error: str = ""
    remedy: str = ""


class EngineUnmapped(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Answers ``UnmapEngine``: no thread touches the engine's memory any more."""

    op: int
    engine: str


class KeysFound(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Answers ``FindKeys``: one outcome per key, OK, MISS or DOWN."""

    op: int
    outcomes: tuple[Outcome, ...]
    #: Every key that is OK lies in this process's memory.
    local: bool = False


class PutsOpened(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Answers ``OpenPuts``, one outcome per key. Only OK keys have an open session."""

    op: int
    outcomes: tuple[Outcome, ...]
    #: No session was opened: this store takes whole objects in one call, and far more cheaply. OK
    #: keys are to be written by one ``WriteLayers(whole=True)``, after the verdict.
    whole: bool = False


class LayersWritten(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Answers ``WriteLayers``: bytes written per key (0 where the outcome is not OK)."""

    op: int
    outcomes: tuple[Outcome, ...]
    num_bytes: tuple[int, ...]
    started_ns: int = 0


class PutsClosed(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Answers ``ClosePuts``: outcomes of the ended and of the revoked keys, in order."""

    op: int
    ended: tuple[Outcome, ...] = ()
    revoked: tuple[Outcome, ...] = ()


class GetsOpened(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Answers ``OpenGets``. OK keys hold a reference on a session until ``CloseGets``."""

    op: int
    outcomes: tuple[Outcome, ...]
    local: bool = False


class LayersLoaded(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Answers ``LoadLayers``: one outcome per key, after all layers of the command."""

    op: int
    outcomes: tuple[Outcome, ...]
    num_bytes: int
    started_ns: int = 0
    #: When layer ``first_layer + i`` was complete in the blocks, monotonic nanoseconds.
    layer_ns: tuple[int, ...] = ()


class GetsClosed(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Answers ``CloseGets``."""

    op: int


class StoreReset(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Answers ``ResetNamespace``."""

    op: int
    num_removed: int = 0


class StoreProbed(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Answers ``ProbeStore``."""

    op: int
    state: StoreState
    reason: str = ""


WorkerEvent = Union[
    Ticked,
    ModelSaid,
    SchedulerSaid,
    PeerLost,
    EngineMapped,
    EngineUnmapped,
    KeysFound,
    PutsOpened,
    LayersWritten,
    PutsClosed,
    GetsOpened,
    LayersLoaded,
    GetsClosed,
    StoreReset,
    StoreProbed,
]
