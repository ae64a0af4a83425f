"""OpenGets, LoadLayers and CloseGets: objects become blocks. The load thread's work."""

from collections.abc import Callable

from kvworker.core.commands import CloseGets, LoadLayers, OpenGets
from kvworker.core.events import GetsClosed, GetsOpened, LayersLoaded
from kvworker.devices.base import Device
from kvworker.outcome import Outcome
from kvworker.stores.base import Store
from kvworker.transfer.job import Job
from kvworker.transfer.layer_reader import LayerReader
from kvworker.transfer.staging import Staging


class Loader:
    """Performs the load thread's commands."""

    def __init__(
        self,
        device: Device,
        store: Store,
        now_ns: Callable[[], int],
        staging: Staging | None,
        layers_per_read: int = 1,
    ) -> None:
        """``staging`` is there if the device is not direct.

        ``layers_per_read`` layers of an object that is not in this process are read in one call:
        more of them is faster in all and later for the first.
        """
        self._device = device
        self._store = store
        self._now_ns = now_ns
        self._staging = staging
        self._layers_per_read = layers_per_read

    def open(self, job: Job) -> GetsOpened:
        """Perform ``OpenGets``. The caller has made sure that the engine is mapped."""
        command, memory = job.command, job.memory
        assert isinstance(command, OpenGets)
        assert memory is not None
        outcomes: tuple[Outcome, ...] = ()
        if command.keys:
            sizes = [memory.pieces(command.group).object_bytes] * len(command.keys)
            outcomes = tuple(self._store.get_start(command.keys, sizes))
        opened = [key for key, out in zip(command.keys, outcomes, strict=True) if out is Outcome.OK]
        local = bool(opened) and all(self._store.local(key) is not None for key in opened)
        return GetsOpened(now_ns=self._now_ns(), op=command.op, outcomes=outcomes, local=local)

    def load(self, job: Job) -> LayersLoaded:
        """Perform ``LoadLayers``. The caller is inside the engine's gate.

        Whatever happens, an error of our own included, the step's last word is published: the
        model side never waits for a load that has ended.
        """
        command, memory = job.command, job.memory
        assert isinstance(command, LoadLayers)
        assert memory is not None
        started_ns = self._now_ns()
        layer_ns: list[int] = []
        failed = True
        try:
            layers = (command.first_layer, command.end_layer)
            pieces = memory.pieces_for(command.group, layers, command.keys, command.block_ids)
            reader = LayerReader(
                self._device,
                self._store,
                memory,
                pieces,
                staging=None if memory.direct else self._staging,
                layers_per_read=self._layers_per_read,
            )
            reader.start(command)
            # Earlier steps may still run on the device, and use the blocks.
            self._device.wait(memory.mapping, command.event)
            if memory.direct:
                self._device.settle()
            for layer in range(*layers):
                if job.unwanted:
                    reader.cancel()
                if not reader.alive:
                    break
                reader.read(layer)
                layer_ns.append(self._now_ns())
                if command.publish and layer + 1 < command.end_layer:
                    memory.page.publish(command.step, layer + 1, failed=False)
            reader.verify_local()
            failed = command.tainted or any(out is not Outcome.OK for out in reader.outcomes)
        finally:
            if command.publish:
                memory.page.publish(command.step, command.end_layer, failed)
        return LayersLoaded(
            now_ns=self._now_ns(),
            op=command.op,
            outcomes=tuple(reader.outcomes),
            num_bytes=reader.num_bytes,
            started_ns=started_ns,
            layer_ns=tuple(layer_ns),
        )

    def close(self, job: Job) -> GetsClosed:
        """Perform ``CloseGets``. Works without the engine: references must not outlive it."""
        command = job.command
        assert isinstance(command, CloseGets)
        if command.keys:
            self._store.get_end(command.keys)
        return GetsClosed(now_ns=self._now_ns(), op=command.op)
