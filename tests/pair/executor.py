"""The transfer threads of a simulated daemon: every operation goes on layer by layer, when told."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvworker.core.commands import (
    Cancel,
    CloseGets,
    ClosePuts,
    FindKeys,
    LoadLayers,
    MapEngine,
    OpenGets,
    OpenPuts,
    PublishProgress,
    ResetNamespace,
    UnmapEngine,
    WriteLayers,
)
from kvworker.core.events import WorkerEvent
from kvworker.outcome import Outcome
from tests.pair.store import Memory, Word
from tests.support.playbook import LAYER_BYTES, NUM_LAYERS, OBJECT_BYTES, answer_to

if TYPE_CHECKING:
    from tests.pair.daemon import Daemon

_LANES: dict[type, str] = {
    OpenGets: "load",
    LoadLayers: "load",
    CloseGets: "load",
    OpenPuts: "save",
    WriteLayers: "save",
    ClosePuts: "save",
    MapEngine: "map",
    UnmapEngine: "map",
}


@dataclasses.dataclass
class Op:
    """One operation in flight."""

    command: Any
    memory: Memory | None
    layer: int = 0
    started: bool = False
    cancelled: bool = False
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)

    @property
    def lane(self) -> str:
        return _LANES.get(type(self.command), "find")

    @property
    def touches(self) -> bool:
        return isinstance(self.command, (LoadLayers, WriteLayers))


class SimExecutor:
    """Carries out the core's commands on the world's store and memories."""

    def __init__(
        self,
        daemon: "Daemon",
        memory_at: Callable[[int], Memory],
        check_touch: Callable[[Memory, int, bytes], None],
        post: Callable[[WorkerEvent], None],
    ) -> None:
        self._daemon = daemon
        self._store = daemon.store
        self._memory_at = memory_at
        self._check_touch = check_touch
        self._post = post
        self._engines: dict[str, Memory] = {}
        #: Read sessions: key → [references, words]. A lease keeps what it names.
        self.gets: dict[str, tuple[int, list[Word]]] = {}
        self.ops: list[Op] = []

    def submit(self, command: Any) -> None:
        if isinstance(command, Cancel):
            for op in self.ops:
                if op.command.op == command.op:
                    op.cancelled = True
        elif isinstance(command, PublishProgress):
            memory = self._engines.get(command.engine)
            if memory is not None:
                memory.page[command.step] = (command.num_layers, command.failed)
        else:
            memory = self._engines.get(getattr(command, "engine", ""))
            op = Op(command, memory)
            op.outcomes = [Outcome.OK] * len(getattr(command, "keys", ()))
            self.ops.append(op)

    def heads(self) -> list[Op]:
        """The operation of each thread that goes on next."""
        found: dict[str, Op] = {}
        for op in self.ops:
            found.setdefault(op.lane, op)
        # Memory is unmapped only once nobody is inside.
        inside = any(op.touches and op.started for op in self.ops)
        return [op for op in found.values() if not (inside and isinstance(op.command, UnmapEngine))]

    def work(self, op: Op, trouble: Outcome) -> None:
        """Go on with an operation; ``trouble`` (or OK) befalls its first key."""
        command = op.command
        if op.outcomes and trouble is not Outcome.OK and op.outcomes[0] is Outcome.OK:
            op.outcomes[0] = trouble
        if isinstance(command, (LoadLayers, WriteLayers)):
            if not self._move_layer(op):
                return
        elif op.cancelled and isinstance(command, (OpenGets, OpenPuts, FindKeys)):
            op.outcomes = [Outcome.CANCELLED] * len(op.outcomes)
        else:
            work = _WORK.get(type(command))
            if work is not None:
                work(self, op)
        self._answer(op)

    def _answer(self, op: Op) -> None:
        command = op.command
        self.ops.remove(op)
        fields: dict[str, Any] = {}
        outcomes: Any = op.outcomes
        if isinstance(command, ClosePuts):
            outcomes = [Outcome.OK] * len(command.end)
        elif isinstance(command, WriteLayers):
            due = (command.end_layer - command.first_layer) * LAYER_BYTES
            fields["num_bytes"] = tuple(due * (one is Outcome.OK) for one in outcomes)
        elif isinstance(command, LoadLayers):
            fields["num_bytes"] = OBJECT_BYTES * outcomes.count(Outcome.OK)
        self._post(answer_to(command, outcomes, 0, **fields))

    def _move_layer(self, op: Op) -> bool:
        """Move one layer; True once the operation is over."""
        command, memory = op.command, op.memory
        mapped = memory is not None and self._engines.get(command.engine) is memory
        if not op.started:
            op.layer = command.first_layer
            closing = any(isinstance(other.command, UnmapEngine) for other in self.ops)
            if not mapped or closing:
                op.outcomes = [Outcome.CANCELLED] * len(op.outcomes)
                return True
            op.started = True
        assert memory is not None
        if op.cancelled:
            op.outcomes = [o if o is not Outcome.OK else Outcome.CANCELLED for o in op.outcomes]
            op.layer = command.end_layer
        else:
            for index, (key, block) in enumerate(zip(command.keys, command.block_ids, strict=True)):
                self._move(op, memory, index, key, block)
            op.layer += 1
        is_over: bool = op.layer >= command.end_layer
        if isinstance(command, LoadLayers) and command.publish:
            bad = command.tainted or any(o is not Outcome.OK for o in op.outcomes)
            memory.page[command.step] = (op.layer, bad and is_over)
        return is_over

    def _move(self, op: Op, memory: Memory, index: int, key: str, block: int) -> None:
        command, layer = op.command, op.layer
        self._check_touch(memory, block, self._store.names[key])
        if isinstance(command, LoadLayers):
            assert memory.begun >= command.step, "rule 5: written before the gate"
            if op.outcomes[index] is Outcome.OK:
                memory.blocks[block][layer] = self.gets[key][1][layer]
            elif layer == command.first_layer and command.step not in memory.given_up:
                # What a failed transfer leaves behind.
                memory.blocks[block][layer] = None
        elif op.outcomes[index] is Outcome.OK and key in self._store.puts:
            self._store.puts[key][1][layer] = memory.blocks[block][layer]

    # Operations that are done in one go.

    def _map(self, op: Op) -> None:
        self._engines[op.command.engine] = self._memory_at(op.command.attach.storages[0].address)

    def _unmap(self, op: Op) -> None:
        self._engines.pop(op.command.engine, None)

    def _find(self, op: Op) -> None:
        self._daemon.note_found(op.command.op)
        for index, key in enumerate(op.command.keys):
            if op.outcomes[index] is Outcome.OK and key not in self._store.objects:
                op.outcomes[index] = Outcome.MISS

    def _open_gets(self, op: Op) -> None:
        for index, key in enumerate(op.command.keys):
            if op.outcomes[index] is not Outcome.OK:
                continue
            count, words = self.gets.get(key, (0, self._store.objects.get(key)))
            if words is None:
                op.outcomes[index] = Outcome.MISS
            else:
                self.gets[key] = (count + 1, words)

    def _close_gets(self, op: Op) -> None:
        for key in op.command.keys:
            count, words = self.gets.pop(key)
            if count > 1:
                self.gets[key] = (count - 1, words)

    def _open_puts(self, op: Op) -> None:
        for index, key in enumerate(op.command.keys):
            if op.outcomes[index] is not Outcome.OK:
                continue
            if key in self._store.objects or key in self._store.puts:
                op.outcomes[index] = Outcome.EXISTS
            else:
                self._store.puts[key] = (self._daemon, [None] * NUM_LAYERS)

    def _close_puts(self, op: Op) -> None:
        for key in op.command.revoke:
            del self._store.puts[key]
        for key in op.command.end:
            self._store.publish(key)

    def _reset(self, op: Op) -> None:
        prefixes = tuple(op.command.prefixes)
        for key in [key for key in self._store.objects if key.startswith(prefixes)]:
            del self._store.objects[key]


_WORK: dict[type, Callable[[SimExecutor, Op], None]] = {
    MapEngine: SimExecutor._map,
    UnmapEngine: SimExecutor._unmap,
    FindKeys: SimExecutor._find,
    OpenGets: SimExecutor._open_gets,
    CloseGets: SimExecutor._close_gets,
    OpenPuts: SimExecutor._open_puts,
    ClosePuts: SimExecutor._close_puts,
    ResetNamespace: SimExecutor._reset,
}
