"""Memory between a store and a device whose KV cache the store cannot touch.

One per transfer thread, so it needs no lock. Devices with ``direct`` have none. A slot is used
again only after both sides are done with it: the device's copies are waited for, and so are the
store's.
"""

from collections.abc import Iterator

from kvcommon.errors import HandleError
from kvcommon.layout import CacheLayout
from kvworker.devices.base import StagingMemory
from kvworker.devices.pieces import GroupPieces
from kvworker.stores.base import Store


class Staging:
    """A bounded buffer, cut into slots as each operation needs them."""

    def __init__(self, memory: StagingMemory) -> None:
        """Take over memory that the device has allocated."""
        self._memory = memory
        self.address = memory.address
        self.num_bytes = memory.num_bytes
        self._store: Store | None = None

    def register(self, store: Store) -> None:
        """Make the buffer known to the store, at the first call.

        Raises:
            HandleError: the store cannot use the memory.
        """
        if self._store is None:
            if not store.register(self.address, self.num_bytes, self._memory.location):
                cause = f"the store {store.name} refuses {self.num_bytes} bytes of staging memory"
                raise HandleError(cause, "raise the limit on locked memory (ulimit -l)")
            self._store = store

    def rounds(
        self, pieces: GroupPieces, first_layer: int, end_layer: int, num_keys: int
    ) -> Iterator[tuple[int, int, range]]:
        """Cut layers by keys into rounds that fit: (first layer, end layer, indices of keys).

        All layers of a key go together if they fit, else layer by layer; layers never go back.
        """
        whole = pieces.span(first_layer, end_layer).num_bytes <= self.num_bytes
        width = end_layer - first_layer if whole else 1
        for first in range(first_layer, end_layer, width):
            slots = self.num_bytes // pieces.span(first, first + width).num_bytes
            for start in range(0, num_keys, slots):
                yield first, first + width, range(start, min(start + slots, num_keys))

    def check_fits(self, layout: CacheLayout) -> None:
        """Raise ``HandleError`` if one layer of one block is larger than the buffer."""
        for layer in (layer for group in layout.groups for layer in group.layers):
            if layer.block_bytes > self.num_bytes:
                cause = f"a block of layer {layer.name} has {layer.block_bytes} bytes"
                raise HandleError(f"{cause}, the staging memory only {self.num_bytes}")

    def close(self) -> None:
        """Unregister and free. The owner has made sure that nothing uses it. Idempotent."""
        if self._store is not None:
            self._store.unregister(self.address)
            self._store = None
        self._memory.close()
