"""An executor with a store and engines in shared memory, and stores that misbehave on request."""

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvcommon.keys import Namespace
from kvcommon.layout import CacheLayout
from kvcommon.memory.page import ProgressPage
from kvcommon.messages import Attach
from kvworker.core.commands import (
    CloseGets,
    ClosePuts,
    LoadLayers,
    MapEngine,
    OpenGets,
    OpenPuts,
    UnmapEngine,
    WorkCommand,
    WriteLayers,
)
from kvworker.core.events import (
    EngineMapped,
    LayersLoaded,
    LayersWritten,
    PutsClosed,
    PutsOpened,
    WorkerEvent,
)
from kvworker.devices.base import Device
from kvworker.devices.cpu import CpuDevice
from kvworker.outcome import Outcome
from kvworker.stores.base import LocalObject, RangeIO, Store
from kvworker.stores.memory import MemoryStore
from kvworker.transfer.executor import Executor, TransferCommand
from tests.kvworker.devices.layouts import NUM_LAYERS, Cache

#: How long a test waits before it calls something lost, seconds.
PATIENCE_S = 20.0
OK = Outcome.OK
ENGINE = "engine#0"


class StagedDevice(CpuDevice):
    """A device whose memory no store can touch."""

    direct = False


class OddStore(MemoryStore):
    """A memory store that can be made to fail, to raise, to wait, and to hide what is local."""

    def __init__(self) -> None:
        super().__init__(64 << 20)
        self.hide_local = False
        #: Keys whose ranges fail from now on.
        self.bad_keys: set[str] = set()
        #: Methods that raise.
        self.raises: set[str] = set()
        #: Methods that wait in the middle until ``resume`` is set, after setting ``arrived``.
        self.waits: set[str] = set()
        self.arrived = threading.Event()
        self.resume = threading.Event()
        self.calls: list[str] = []
        self.registered: dict[int, int] = {}
        #: Registrations that are taken; further ones are refused.
        self.refuse_from = 1 << 30
        #: Likewise, and further ones raise.
        self.raise_from = 1 << 30
        #: ``local`` tells once where an object lies, and then that it is not here.
        self.lose_local = False
        #: Called by whoever calls a method, with its name.
        self.on_enter: Callable[[str], None] | None = None

    def _enter(self, method: str) -> None:
        self.calls.append(method)
        if self.on_enter is not None:
            self.on_enter(method)
        if method in self.raises:
            raise RuntimeError(f"{method}: as the test wished")
        if method in self.waits:
            self.arrived.set()
            assert self.resume.wait(PATIENCE_S)

    def register(self, address: int, size: int, location: str = "cpu") -> bool:
        if len(self.registered) >= self.raise_from:
            raise RuntimeError("register: as the test wished")
        if len(self.registered) >= self.refuse_from:
            return False
        self.registered[address] = size
        return super().register(address, size, location)

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def find(self, keys: Sequence[str]) -> list[Outcome]:
        self._enter("find")
        return super().find(keys)

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        self._enter("put_start")
        return super().put_start(keys, sizes)

    def put_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        self._enter("put_ranges")
        return self._spoil(ranges, super().put_ranges(ranges))

    def put_end(self, keys: Sequence[str]) -> list[Outcome]:
        self._enter("put_end")
        return super().put_end(keys)

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        self._enter("put_revoke")
        return super().put_revoke(keys)

    def get_start(self, keys: Sequence[str], sizes: Sequence[int] | None = None) -> list[Outcome]:
        self._enter("get_start")
        return super().get_start(keys, sizes)

    def get_ranges(self, ranges: Sequence[RangeIO]) -> list[Outcome]:
        self._enter("get_ranges")
        return self._spoil(ranges, super().get_ranges(ranges))

    def get_end(self, keys: Sequence[str]) -> None:
        self._enter("get_end")
        super().get_end(keys)

    def local(self, key: str) -> LocalObject | None:
        if self.hide_local:
            return None
        found = super().local(key)
        self.hide_local = self.lose_local
        return found

    def _spoil(self, ranges: Sequence[RangeIO], outcomes: list[Outcome]) -> list[Outcome]:
        return [
            Outcome.FAILED if one.key in self.bad_keys else out
            for one, out in zip(ranges, outcomes, strict=True)
        ]


class Model:
    """The model side of one attach: KV memory and a page."""

    def __init__(self, layout: CacheLayout, seed: int) -> None:
        self.cache = Cache(layout, seed)
        self.page = ProgressPage.create()

    def attach(self) -> Attach:
        return Attach(
            pid=os.getpid(),
            device="cpu:0",
            storages=self.cache.handles,
            layout=self.cache.layout,
            page=self.page.handle,
            namespace=NAMESPACE,
        )

    def close(self) -> None:
        self.page.close()
        self.cache.close()


NAMESPACE = Namespace(
    model="m",
    revision="r",
    dtype="d",
    cache_dtype="auto",
    block_sizes=(16,),
    layout=("l",),
    layers=(0, NUM_LAYERS),
    tensor_parallel=1,
    pipeline_parallel=1,
    rank=(0, 0),
    hash_algorithm="sha256",
    hash_seed="0",
)


class Rig:
    """An executor; ``ask`` waits for the answer of a command."""

    def __init__(
        self,
        store: Store,
        device: Device | None = None,
        *,
        layers_per_read: int = 1,
        staging_bytes: int = 1 << 20,
    ) -> None:
        self.store = store
        self._posted: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()
        #: Every event so far, in the order of posting.
        self.events: list[WorkerEvent] = []
        self.ops = itertools.count(1)
        self.executor = Executor(
            device or CpuDevice("cpu:0"),
            store,
            self._posted.put,
            time.monotonic_ns,
            layers_per_read=layers_per_read,
            staging_bytes=staging_bytes,
        )

    def submit(self, command: TransferCommand) -> None:
        self.executor.submit(command)

    def answer(self, op: int) -> WorkerEvent:
        """Wait for the event that answers ``op``."""
        while True:
            for event in self.events:
                if getattr(event, "op", 0) == op:
                    return event
            self.events.append(self._posted.get(timeout=PATIENCE_S))

    def ask(self, command: WorkCommand) -> WorkerEvent:
        self.submit(command)
        return self.answer(command.op)

    def close(self) -> None:
        self.executor.close(PATIENCE_S)
        while not self._posted.empty():
            self.events.append(self._posted.get())
        ops = [getattr(event, "op", 0) for event in self.events]
        assert len(ops) == len(set(ops)), "an operation was answered twice"

    # -- the commands, with the usual arguments ---------------------------------------------

    def map(self, model: Model, engine: str = ENGINE) -> EngineMapped:
        answer = self.ask(MapEngine(op=next(self.ops), engine=engine, attach=model.attach()))
        assert isinstance(answer, EngineMapped)
        return answer

    def unmap(self, engine: str = ENGINE) -> None:
        self.ask(UnmapEngine(op=next(self.ops), engine=engine))

    def open_puts(self, keys: Sequence[str], engine: str = ENGINE) -> PutsOpened:
        command = OpenPuts(op=next(self.ops), engine=engine, step=1, group=0, keys=tuple(keys))
        answer = self.ask(command)
        assert isinstance(answer, PutsOpened)
        return answer

    def write(
        self, keys: Sequence[str], blocks: Sequence[int], first: int = 0, end: int = NUM_LAYERS
    ) -> LayersWritten:
        answer = self.ask(self.write_command(keys, blocks, first, end))
        assert isinstance(answer, LayersWritten)
        return answer

    def write_command(
        self, keys: Sequence[str], blocks: Sequence[int], first: int = 0, end: int = NUM_LAYERS
    ) -> WriteLayers:
        return WriteLayers(
            op=next(self.ops),
            engine=ENGINE,
            step=1,
            group=0,
            keys=tuple(keys),
            block_ids=tuple(blocks),
            first_layer=first,
            end_layer=end,
        )

    def close_puts(self, end: Sequence[str] = (), revoke: Sequence[str] = ()) -> PutsClosed:
        command = ClosePuts(
            op=next(self.ops), engine=ENGINE, step=1, end=tuple(end), revoke=tuple(revoke)
        )
        answer = self.ask(command)
        assert isinstance(answer, PutsClosed)
        return answer

    def save(self, keys: Sequence[str], blocks: Sequence[int]) -> None:
        """Store blocks, layer by layer."""
        assert set(self.open_puts(keys).outcomes) == {OK}
        for layer in range(NUM_LAYERS):
            assert set(self.write(keys, blocks, layer, layer + 1).outcomes) == {OK}
        assert set(self.close_puts(end=keys).ended) == {OK}

    def open_gets(self, keys: Sequence[str]) -> WorkerEvent:
        return self.ask(
            OpenGets(op=next(self.ops), engine=ENGINE, step=1, group=0, keys=tuple(keys))
        )

    def load_command(
        self,
        keys: Sequence[str],
        blocks: Sequence[int],
        *,
        step: int = 1,
        publish: bool = True,
        tainted: bool = False,
    ) -> LoadLayers:
        return LoadLayers(
            op=next(self.ops),
            engine=ENGINE,
            step=step,
            group=0,
            keys=tuple(keys),
            block_ids=tuple(blocks),
            first_layer=0,
            end_layer=NUM_LAYERS,
            publish=publish,
            tainted=tainted,
        )

    def load(
        self, keys: Sequence[str], blocks: Sequence[int], *, tainted: bool = False, step: int = 1
    ) -> LayersLoaded:
        answer = self.ask(self.load_command(keys, blocks, tainted=tainted, step=step))
        assert isinstance(answer, LayersLoaded)
        return answer

    def close_gets(self, keys: Sequence[str]) -> None:
        self.ask(CloseGets(op=next(self.ops), engine=ENGINE, keys=tuple(keys)))


@contextmanager
def rig_with(
    layout: CacheLayout,
    device: Device | None = None,
    *,
    layers_per_read: int = 1,
    staging_bytes: int = 1 << 20,
) -> Iterator[tuple[Rig, OddStore, Model]]:
    """A rig whose engine is mapped; checks at the end that everything was given back."""
    store, model = OddStore(), Model(layout, 1)
    store.open()
    rig = Rig(store, device, layers_per_read=layers_per_read, staging_bytes=staging_bytes)
    assert rig.map(model).error == ""
    try:
        yield rig, store, model
    finally:
        store.resume.set()
        rig.close()
        model.close()
        store.close()
    assert store.registered == {}
