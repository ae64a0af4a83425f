"""OpenPuts, WriteLayers and ClosePuts: blocks become objects. The save thread's work."""

from collections.abc import Callable, Sequence

from kvworker.core.commands import ClosePuts, OpenPuts, WriteLayers
from kvworker.core.events import LayersWritten, PutsClosed, PutsOpened
from kvworker.devices.base import Device, Packed
from kvworker.devices.pieces import GroupPieces, packed_range
from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO, Store
from kvworker.transfer.engine_memory import EngineMemory
from kvworker.transfer.job import Job
from kvworker.transfer.staging import Staging


class Saver:
    """Performs the save thread's commands."""

    def __init__(
        self,
        device: Device,
        store: Store,
        now_ns: Callable[[], int],
        staging: Staging | None,
        *,
        layerwise: bool = True,
    ) -> None:
        """``staging`` is there if the device is not direct; ``layerwise``: always by sessions."""
        self._layerwise = layerwise
        self._device = device
        self._store = store
        self._now_ns = now_ns
        self._staging = staging

    def open(self, job: Job) -> PutsOpened:
        """Perform ``OpenPuts``. The caller has made sure that the engine is mapped."""
        command, memory = job.command, job.memory
        assert isinstance(command, OpenPuts)
        assert memory is not None
        if self._staging is None and not self._layerwise and self._store.whole_puts:
            return PutsOpened(
                now_ns=self._now_ns(),
                op=command.op,
                outcomes=(Outcome.OK,) * len(command.keys),
                whole=True,
            )
        size = memory.pieces(command.group).object_bytes
        outcomes: Sequence[Outcome] = ()
        if command.keys:
            outcomes = self._store.put_start(command.keys, [size] * len(command.keys))
        return PutsOpened(now_ns=self._now_ns(), op=command.op, outcomes=tuple(outcomes))

    def write(self, job: Job) -> LayersWritten:
        """Perform ``WriteLayers``. The caller is inside the engine's gate."""
        command, memory = job.command, job.memory
        assert isinstance(command, WriteLayers)
        assert memory is not None
        started_ns = self._now_ns()
        layers = (command.first_layer, command.end_layer)
        pieces = memory.pieces_for(command.group, layers, command.keys, command.block_ids)
        span = pieces.span(*layers)
        # The model says that the layers are queued; the device says when they are written.
        self._device.wait(memory.mapping, command.event)
        if self._staging is None or memory.direct:
            self._device.settle()
            blocks = zip(command.keys, command.block_ids, strict=True)
            ranges = [RangeIO(k, span.addresses(b), span.sizes, span.offsets) for k, b in blocks]
            put = self._store.put_objects if command.whole else self._store.put_ranges
            outcomes = put(ranges) if ranges else []
        else:
            outcomes = self._write_staged(job, command, memory, pieces, self._staging)
        return LayersWritten(
            now_ns=self._now_ns(),
            op=command.op,
            outcomes=tuple(outcomes),
            num_bytes=tuple(span.num_bytes if out is Outcome.OK else 0 for out in outcomes),
            started_ns=started_ns,
        )

    def _write_staged(
        self,
        job: Job,
        command: WriteLayers,
        memory: EngineMemory,
        pieces: GroupPieces,
        staging: Staging,
    ) -> list[Outcome]:
        outcomes = [Outcome.OK] * len(command.keys)
        layers = (command.first_layer, command.end_layer)
        for first, end, indices in staging.rounds(pieces, *layers, len(command.keys)):
            live = [index for index in indices if outcomes[index] is Outcome.OK]
            if job.unwanted:
                for index in live:
                    outcomes[index] = Outcome.CANCELLED
                continue
            span = pieces.span(first, end)
            count = len(live)
            block_ids = [command.block_ids[index] for index in live]
            packed = Packed(staging.address, count, block_ids, range(count))
            self._device.gather(memory.mapping, pieces.layout, range(first, end), packed)
            ranges = [
                packed_range(command.keys[index], span, packed, slot)
                for slot, index in enumerate(live)
            ]
            for index, outcome in zip(
                live, self._store.put_ranges(ranges) if ranges else (), strict=True
            ):
                outcomes[index] = outcome
        return outcomes

    def close(self, job: Job) -> PutsClosed:
        """Perform ``ClosePuts``. Works without the engine: sessions must not outlive it."""
        command = job.command
        assert isinstance(command, ClosePuts)
        ended = self._store.put_end(command.end) if command.end else ()
        revoked = self._store.put_revoke(command.revoke) if command.revoke else ()
        return PutsClosed(
            now_ns=self._now_ns(), op=command.op, ended=tuple(ended), revoked=tuple(revoked)
        )
