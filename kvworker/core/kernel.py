"""What all parts of the core share: the clock of the event at hand, operations, commands, counts.

One part starts an operation by handing its command and the method that takes its answer; the
kernel finds that method again when the answer comes. No part emits a command in another way.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, Union

from kvcommon.errors import LocalProtocolError
from kvcommon.messages import DaemonToModel, DaemonToScheduler
from kvworker.core.commands import (
    Cancel,
    CloseGets,
    ClosePuts,
    FindKeys,
    LoadLayers,
    MapEngine,
    OpenGets,
    OpenPuts,
    ProbeStore,
    ResetNamespace,
    SendToModel,
    SendToScheduler,
    UnmapEngine,
    WorkCommand,
    WorkerCommand,
    WriteLayers,
)
from kvworker.core.config import CoreConfig
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
)

#: Events that end it.
Answer = Union[
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
#: Which event answers which command.
ANSWERS: dict[type, type] = {
    MapEngine: EngineMapped,
    UnmapEngine: EngineUnmapped,
    FindKeys: KeysFound,
    OpenPuts: PutsOpened,
    WriteLayers: LayersWritten,
    ClosePuts: PutsClosed,
    OpenGets: GetsOpened,
    LoadLayers: LayersLoaded,
    CloseGets: GetsClosed,
    ResetNamespace: StoreReset,
    ProbeStore: StoreProbed,
}
AnswerT = TypeVar("AnswerT", bound=Answer)


class Operation(NamedTuple):
    """Work in flight."""

    command: WorkCommand
    answered: Callable[[Any], None]


class Kernel:
    """Shared by the parts of one core."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        #: Time of the event at hand.
        self.now_ns = 0
        #: Commands of the event at hand, in order.
        self.out: list[WorkerCommand] = []
        #: Work in flight, by op.
        self.operations: dict[int, Operation] = {}
        #: By metric name, labels included.
        self.counters: dict[str, float] = {}
        self._last_op = 0

    def next_op(self) -> int:
        """Return a number that no operation has had."""
        self._last_op += 1
        return self._last_op

    def start(self, command: WorkCommand, answered: Callable[[AnswerT], None]) -> int:
        """Start work; ``answered`` is called with its terminal event. Returns its op."""
        assert command.op not in self.operations
        self.operations[command.op] = Operation(command, answered)
        self.out.append(command)
        return command.op

    def cancel(self, op: int) -> None:
        """Ask for an operation's end. It still ends by its own event."""
        assert op in self.operations
        self.out.append(Cancel(op=op))

    def answer(self, event: Answer) -> None:
        """Hand a terminal event to whoever waits for it.

        Raises:
            LocalProtocolError: nobody does, or it is no answer to that command.
        """
        operation = self.operations.get(event.op)
        if operation is None:
            raise LocalProtocolError(f"{type(event).__name__}: operation {event.op} is not open")
        if ANSWERS[type(operation.command)] is not type(event):
            name = type(operation.command).__name__
            raise LocalProtocolError(f"{type(event).__name__} does not answer {name}")
        if not _fits(operation.command, event):
            raise LocalProtocolError(f"operation {event.op}: wrong number of outcomes")
        del self.operations[event.op]
        operation.answered(event)

    def to_model(self, engine: str, body: DaemonToModel) -> None:
        """Say something to the model side."""
        self.out.append(SendToModel(engine=engine, body=body))

    def to_scheduler(self, engine: str, body: DaemonToScheduler) -> None:
        """Say something to the scheduler side."""
        self.out.append(SendToScheduler(engine=engine, body=body))

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to the counter ``kvferry_<name>_total`` with these labels."""
        inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
        full = f"kvferry_{name}_total{{{inside}}}" if inside else f"kvferry_{name}_total"
        self.counters[full] = self.counters.get(full, 0) + amount


def _fits(command: WorkCommand, event: Answer) -> bool:
    """Say whether the answer has one outcome for each key."""
    if isinstance(event, PutsClosed):
        assert isinstance(command, ClosePuts)
        return len(event.ended) == len(command.end) and len(event.revoked) == len(command.revoke)
    outcomes: Sequence[object] | None = getattr(event, "outcomes", None)
    if outcomes is None:
        return True
    keys: Sequence[str] = getattr(command, "keys", ())
    num_bytes = event.num_bytes if isinstance(event, LayersWritten) else outcomes
    return len(outcomes) == len(keys) == len(num_bytes)
