"""One LoadLayers, layer by layer: from objects in this process, and from elsewhere."""

from kvworker.core.commands import LoadLayers
from kvworker.devices.base import Device, Packed
from kvworker.devices.pieces import GroupPieces, Span, packed_range
from kvworker.outcome import Outcome
from kvworker.stores.base import LocalObject, RangeIO, Store
from kvworker.transfer.engine_memory import EngineMemory
from kvworker.transfer.staging import Staging


class LayerReader:
    """The keys of one load and what became of them. One thread, inside the engine's gate."""

    def __init__(
        self,
        device: Device,
        store: Store,
        memory: EngineMemory,
        pieces: GroupPieces,
        *,
        staging: Staging | None,
        layers_per_read: int,
    ) -> None:
        """Keep what the load needs; ``start`` tells it what to load."""
        self._device = device
        self._store = store
        self._mapping = memory.mapping
        self._pieces = pieces
        self._staging = staging
        self._layers_per_read = layers_per_read
        #: Per key, OK as long as nothing went wrong.
        self.outcomes: list[Outcome] = []
        #: Bytes moved so far, of all keys.
        self.num_bytes = 0
        # Objects of this process: (index of the key, key, where); and as the device wants them.
        self._local: list[tuple[int, str, LocalObject]] = []
        self._local_blocks: list[int] = []
        self._local_sources: list[int] = []
        # Others: (index of the key, key, block).
        self._remote: list[tuple[int, str, int]] = []
        self._end_layer = 0
        self._read_until = 0

    def start(self, command: LoadLayers) -> None:
        """Find out where each object lies."""
        size = self._pieces.object_bytes
        self._end_layer = command.end_layer
        self.outcomes = [Outcome.OK] * len(command.keys)
        for index, (key, block) in enumerate(zip(command.keys, command.block_ids, strict=True)):
            found = self._store.local(key)
            if found is None:
                self._remote.append((index, key, block))
            elif found.size != size:
                self.outcomes[index] = Outcome.FAILED
            else:
                self._local.append((index, key, found))
                self._local_blocks.append(block)
                self._local_sources.append(found.address)

    @property
    def alive(self) -> bool:
        """Some key is still worth reading."""
        return bool(self._local_blocks or self._remote)

    def cancel(self) -> None:
        """Give up the keys that have not failed."""
        self.outcomes = [Outcome.CANCELLED if out is Outcome.OK else out for out in self.outcomes]
        self._local, self._local_blocks, self._local_sources, self._remote = [], [], [], []

    def verify_local(self) -> None:
        """Fail the keys whose objects may have gone while they were copied. After the last layer.

        A session can be lost under our hands; then the memory may have held anything.
        """
        for index, key, found in self._local:
            if self._store.local(key) != found:
                self.outcomes[index] = Outcome.EXPIRED

    def read(self, layer: int) -> None:
        """Bring one layer of every living key into its block; layers come in order."""
        if self._local_blocks:
            self._device.copy_in(
                self._mapping,
                self._pieces.layout,
                range(layer, layer + 1),
                self._local_blocks,
                self._local_sources,
            )
            layer_bytes = self._pieces.span(layer, layer + 1).num_bytes
            self.num_bytes += layer_bytes * len(self._local_blocks)
        if self._remote and layer >= self._read_until:
            self._read_until = min(layer + self._layers_per_read, self._end_layer)
            if self._staging is None:
                span = self._pieces.span(layer, self._read_until)
                self._get(span, self._remote, [span.addresses(b) for _, _, b in self._remote])
            else:
                self._read_staged(layer, self._staging)
            self._remote = [one for one in self._remote if self.outcomes[one[0]] is Outcome.OK]

    def _get(
        self, span: Span, wanted: list[tuple[int, str, int]], addresses: list[list[int]]
    ) -> None:
        """Read a span of some keys straight into their blocks, in one call."""
        ranges = [
            RangeIO(key, where, span.sizes, span.offsets)
            for (_, key, _), where in zip(wanted, addresses, strict=True)
        ]
        self._note(span, wanted, self._store.get_ranges(ranges))

    def _note(
        self, span: Span, wanted: list[tuple[int, str, int]], outcomes: list[Outcome]
    ) -> None:
        for (index, _, _), outcome in zip(wanted, outcomes, strict=True):
            self.outcomes[index] = outcome
            if outcome is Outcome.OK:
                self.num_bytes += span.num_bytes

    def _read_staged(self, layer: int, staging: Staging) -> None:
        """Read into staging memory, then let the device copy what arrived."""
        pieces, remote = self._pieces, self._remote
        for first, end, indices in staging.rounds(pieces, layer, self._read_until, len(remote)):
            wanted = [remote[i] for i in indices if self.outcomes[remote[i][0]] is Outcome.OK]
            if not wanted:
                continue
            span = pieces.span(first, end)
            slots = Packed(staging.address, len(wanted), (), ())
            ranges = [
                packed_range(key, span, slots, slot) for slot, (_, key, _) in enumerate(wanted)
            ]
            self._note(span, wanted, self._store.get_ranges(ranges))
            arrived = [
                (block, slot)
                for slot, (index, _, block) in enumerate(wanted)
                if self.outcomes[index] is Outcome.OK
            ]
            packed = slots._replace(
                block_ids=[block for block, _ in arrived], slots=[slot for _, slot in arrived]
            )
            self._device.scatter(self._mapping, pieces.layout, range(first, end), packed)
