"""A command on its way through a transfer thread, and its answer when it could not be done.

An operation is a function from a job to its one terminal event. It never posts that event itself,
so no path through it can answer twice or not at all.
"""

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
from kvworker.transfer.engine_memory import EngineMemory


class Job:
    """One submitted command."""

    __slots__ = ("cancelled", "command", "memory")

    def __init__(self, command: WorkCommand, memory: EngineMemory | None) -> None:
        """``memory`` is the engine's as it was mapped when the command was submitted.

        An engine that comes back under the same name has another one: what was meant for the old
        one must not touch it.
        """
        self.command = command
        self.memory = memory
        #: Set by any thread; looked at between layers.
        self.cancelled = False

    @property
    def unwanted(self) -> bool:
        """Cancelled, or its engine's memory is gone or going."""
        return self.cancelled or self.memory is None or self.memory.gate.closed


def unperformed(command: WorkCommand, outcome: Outcome, reason: str, now_ns: int) -> WorkerEvent:
    """Answer a command of which nothing (or nothing that counts) was done.

    Args:
        command: What was asked for.
        outcome: For every key: CANCELLED or FAILED.
        reason: For a person.
        now_ns: Monotonic time.
    """
    if isinstance(command, (MapEngine, UnmapEngine)):
        return _engine_answer(command, reason, now_ns)
    if isinstance(command, (FindKeys, ResetNamespace, ProbeStore)):
        return _question_answer(command, reason, now_ns)
    if isinstance(command, (ClosePuts, CloseGets)):
        return _closing_answer(command, outcome, now_ns)
    return _moving_answer(command, (outcome,) * len(command.keys), now_ns)


def _engine_answer(command: MapEngine | UnmapEngine, reason: str, now_ns: int) -> WorkerEvent:
    op, engine = command.op, command.engine
    if isinstance(command, MapEngine):
        return EngineMapped(now_ns=now_ns, op=op, engine=engine, error=reason)
    return EngineUnmapped(now_ns=now_ns, op=op, engine=engine)


def _question_answer(
    command: FindKeys | ResetNamespace | ProbeStore, reason: str, now_ns: int
) -> WorkerEvent:
    if isinstance(command, FindKeys):
        # A lookup knows hits, misses and a store that does not answer.
        outcomes = (Outcome.DOWN,) * len(command.keys)
        return KeysFound(now_ns=now_ns, op=command.op, outcomes=outcomes)
    if isinstance(command, ResetNamespace):
        return StoreReset(now_ns=now_ns, op=command.op)
    return StoreProbed(now_ns=now_ns, op=command.op, state=StoreState.DOWN, reason=reason)


def _closing_answer(command: ClosePuts | CloseGets, outcome: Outcome, now_ns: int) -> WorkerEvent:
    if isinstance(command, CloseGets):
        return GetsClosed(now_ns=now_ns, op=command.op)
    ended, revoked = (outcome,) * len(command.end), (outcome,) * len(command.revoke)
    return PutsClosed(now_ns=now_ns, op=command.op, ended=ended, revoked=revoked)


def _moving_answer(
    command: OpenPuts | WriteLayers | OpenGets | LoadLayers,
    outcomes: tuple[Outcome, ...],
    now_ns: int,
) -> WorkerEvent:
    op = command.op
    if isinstance(command, OpenPuts):
        return PutsOpened(now_ns=now_ns, op=op, outcomes=outcomes)
    if isinstance(command, OpenGets):
        return GetsOpened(now_ns=now_ns, op=op, outcomes=outcomes)
    if isinstance(command, WriteLayers):
        num_bytes = (0,) * len(outcomes)
        return LayersWritten(now_ns=now_ns, op=op, outcomes=outcomes, num_bytes=num_bytes)
    return LayersLoaded(now_ns=now_ns, op=op, outcomes=outcomes, num_bytes=0)
