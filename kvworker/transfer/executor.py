"""The transfer threads: commands of the core in, one event per command out.

Four threads. ``find`` asks the store, ``load`` and ``save`` move bytes, ``map`` maps and unmaps
engines. Loads never wait behind saves, and the save thread, for which nobody waits, runs at a lower
priority. Each thread takes its commands in order, which keeps those of one engine and direction in
order.

Threading: ``submit`` and ``close`` are called by one thread, the shell's, and do not block on the
store. Events are posted from the transfer threads (and from ``submit`` where a command cannot even
be queued). Every command with an ``op`` is answered exactly once, whatever happens; one that the
store never answers is the exception, and it dies with the process.
"""

import time
from collections.abc import Callable
from typing import Union

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
    PublishProgress,
    ResetNamespace,
    UnmapEngine,
    WorkCommand,
    WriteLayers,
)
from kvworker.core.events import WorkerEvent
from kvworker.devices.base import Device
from kvworker.outcome import Outcome
from kvworker.stores.base import Store
from kvworker.transfer.find import Finder
from kvworker.transfer.job import Job, unperformed
from kvworker.transfer.lane import Lane
from kvworker.transfer.load import Loader
from kvworker.transfer.mapping import EngineMaps
from kvworker.transfer.save import Saver
from kvworker.transfer.staging import Staging

#: What ``submit`` takes.
TransferCommand = Union[WorkCommand, PublishProgress, Cancel]

#: Commands of one thread that may wait; more of them are answered FAILED at once.
MAX_BACKLOG = 1024
#: Bytes of staging memory, for loads and for saves each, where a device needs it.
STAGING_BYTES = 64 << 20

#: Commands that touch the engine's memory: performed inside its gate.
_TOUCHING = (WriteLayers, LoadLayers)
#: Commands that are pointless, but harmless, once the engine is gone.
_OPENING = (OpenPuts, OpenGets)
#: Commands that give something back: never refused, cancelled or dropped. There are only as many
#: of them as of those that took it.
_CLOSING = (UnmapEngine, ClosePuts, CloseGets)


class Executor:
    """Carries out every command that starts work. See the module docstring."""

    def __init__(
        self,
        device: Device,
        store: Store,
        post: Callable[[WorkerEvent], None],
        now_ns: Callable[[], int],
        *,
        save_nice: int = 10,
        save_layerwise: bool = True,
        layers_per_read: int = 1,
        staging_bytes: int = STAGING_BYTES,
        try_direct: bool = False,
    ) -> None:
        """Start the threads.

        Args:
            device: Whose memory engines attach.
            store: An open store; the caller closes it, after this.
            post: Takes an event from any thread; must not raise and not block.
            now_ns: Monotonic clock.
            save_nice: By how much the save thread raises its niceness.
            save_layerwise: Always save by put sessions, layer by layer, also where the store takes
                whole objects more cheaply.
            layers_per_read: Layers per read of objects that are not in this process.
            staging_bytes: Size of each staging buffer, if the device needs any.
            try_direct: Do without staging where the store can reach the device's memory.
        """
        self._post = post
        self._now_ns = now_ns
        self._closed = False
        self._jobs: dict[int, Job] = {}
        self._staging: list[Staging] = []
        if not device.direct:
            on_device = store.device_memory
            self._staging = [
                Staging(device.allocate_staging(staging_bytes, on_device=on_device))
                for _ in range(2)
            ]
        load_staging, save_staging = self._staging or (None, None)
        self._maps = EngineMaps(
            device, store, now_ns, self._staging, try_direct=try_direct
        )
        finder = Finder(store, now_ns)
        loader = Loader(device, store, now_ns, load_staging, layers_per_read)
        saver = Saver(device, store, now_ns, save_staging, layerwise=save_layerwise)
        self._operations: dict[type, Callable[[Job], WorkerEvent]] = {
            FindKeys: finder.find,
            ResetNamespace: finder.reset,
            ProbeStore: finder.probe,
            OpenGets: loader.open,
            LoadLayers: loader.load,
            CloseGets: loader.close,
            OpenPuts: saver.open,
            WriteLayers: saver.write,
            ClosePuts: saver.close,
            MapEngine: self._maps.map,
            UnmapEngine: self._maps.unmap,
        }
        self._lanes = {
            name: Lane(name, device.bind_thread, self._perform, self._fail, nice)
            for name, nice in (("find", 0), ("load", 0), ("save", save_nice), ("map", 0))
        }

    def submit(self, command: TransferCommand) -> None:
        """Start a command. Publishing and cancelling are done before this returns."""
        if isinstance(command, Cancel):
            job = self._jobs.get(command.op)
            if job is not None:
                self._cancel(job)
        elif isinstance(command, PublishProgress):
            self._publish(command)
        else:
            self._start(command)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what can be cancelled, answer everything, end the threads, unmap the engines.

        A thread that is stuck in a store call after ``timeout_s`` is left behind: its queue is
        answered here, and what it may still touch stays mapped. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        for job in list(self._jobs.values()):
            self._cancel(job)
        for lane in self._lanes.values():
            lane.finish()
        deadline = time.monotonic() + timeout_s
        stuck = [
            lane
            for lane in self._lanes.values()
            if not lane.join(max(0.0, deadline - time.monotonic()))
        ]
        for lane in stuck:
            for job in lane.drain():
                self._answer(job, self._refusal(job, Outcome.CANCELLED, "the daemon is closing"))
        if not stuck:
            self._maps.close()
            for buffer in self._staging:
                buffer.close()

    def _start(self, command: WorkCommand) -> None:
        engine = getattr(command, "engine", "")
        job = Job(command, self._maps.get(engine))
        lane = self._lanes[_LANE_OF[type(command)]]
        full = lane.backlog >= MAX_BACKLOG and not isinstance(command, _CLOSING)
        if self._closed or full:
            outcome = Outcome.CANCELLED if self._closed else Outcome.FAILED
            reason = "the daemon is closing" if self._closed else f"{lane.name}: too much is queued"
            self._post(self._refusal(job, outcome, reason))
            return
        if isinstance(command, UnmapEngine) and job.memory is not None:
            # At once: loads and saves that wait in their queues will not begin any more.
            job.memory.gate.close()
        self._jobs[command.op] = job
        lane.put(job)

    def _publish(self, command: PublishProgress) -> None:
        memory = self._maps.get(command.engine)
        if memory is not None and memory.gate.enter():
            try:
                memory.page.publish(command.step, command.num_layers, command.failed)
            finally:
                memory.gate.leave()

    def _perform(self, job: Job) -> None:
        """Do a job in its thread, and answer it before the engine's memory may go away."""
        command, memory = job.command, job.memory
        operation = self._operations[type(command)]
        if self._is_pointless(job):
            self._answer(job, self._refusal(job, Outcome.CANCELLED, "cancelled"))
        elif not isinstance(command, _TOUCHING):
            self._answer(job, operation(job))
        elif memory is None or not memory.gate.enter():
            self._answer(job, self._refusal(job, Outcome.CANCELLED, "no such engine"))
        else:
            try:
                self._answer(job, operation(job))
            finally:
                memory.gate.leave()

    @staticmethod
    def _is_pointless(job: Job) -> bool:
        if isinstance(job.command, LoadLayers):
            # Cancelled or not, it has a page to publish.
            return False
        return job.cancelled or (isinstance(job.command, _OPENING) and job.unwanted)

    def _cancel(self, job: Job) -> None:
        if not isinstance(job.command, _CLOSING):
            job.cancelled = True

    def _fail(self, job: Job, reason: str) -> None:
        self._answer(job, self._refusal(job, Outcome.FAILED, reason))

    def _refusal(self, job: Job, outcome: Outcome, reason: str) -> WorkerEvent:
        return unperformed(job.command, outcome, reason, self._now_ns())

    def _answer(self, job: Job, event: WorkerEvent) -> None:
        # Whoever takes the job out of the table answers it.
        if self._jobs.pop(job.command.op, None) is not None:
            self._post(event)


_LANE_OF: dict[type, str] = {
    FindKeys: "find",
    ResetNamespace: "find",
    ProbeStore: "find",
    OpenGets: "load",
    LoadLayers: "load",
    CloseGets: "load",
    OpenPuts: "save",
    WriteLayers: "save",
    ClosePuts: "save",
    MapEngine: "map",
    UnmapEngine: "map",
}
