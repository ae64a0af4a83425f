"""Which layers call vLLM's hooks, learnt from the first forward pass.

Not every layer does: only the two attention operators that vLLM decorates. Mamba layers, indexer
caches and draft layers stay silent, so what they need must be waited for before any layer runs.
"""

from collections.abc import Sequence


class HookTable:
    """Layer names to positions, and what to wait for at each hook. Pure."""

    def __init__(self, layer_names: Sequence[str]) -> None:
        """Take the layer table."""
        self._index = {name: index for index, name in enumerate(layer_names)}
        self._seen: set[str] = set()
        self._computed: set[int] = set()
        #: Layers that must be loaded before any hooked layer runs: up to the last silent one.
        self._floor = len(layer_names)
        #: A whole forward pass has been watched.
        self.learned = False
        self._distrusted = False

    @property
    def silent(self) -> bool:
        """No layer can be relied on to call a hook: load everything before the forward pass."""
        return self._distrusted or not self.learned

    def distrust(self) -> None:
        """A forward pass called no hook although others did: from now on rely on none."""
        self._distrusted = True

    def saw(self, name: str) -> None:
        """A layer has called a hook (only told until ``learned``)."""
        if name in self._index:
            self._seen.add(name)

    def needed_for(self, name: str) -> int:
        """Number of layers (table order) that must be loaded before ``name`` may run."""
        index = self._index.get(name)
        return self._floor if index is None else max(index + 1, self._floor)

    def computed(self, name: str, num_computed: int) -> int:
        """Mark a layer as written.

        Args:
            name: The layer; unknown names (Ascend passes an empty one) are ignored.
            num_computed: Layers known to be written so far, a prefix of the table.

        Returns:
            The new length of the written prefix, or 0 if it did not grow.
        """
        index = self._index.get(name)
        if index is None or index < num_computed:
            return 0
        self._computed.add(index)
        count = num_computed
        while count in self._computed:
            self._computed.remove(count)
            count += 1
        return count if count > num_computed else 0

    def step_over(self) -> None:
        """The step has ended. One in which any hook was called teaches which are silent."""
        self._computed.clear()
        if self.learned or not self._seen:
            return
        silent = [index for name, index in self._index.items() if name not in self._seen]
        self._floor = max(silent) + 1 if silent else 0
        self.learned = True
