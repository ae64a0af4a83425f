"""The memory of one engine's rank as the transfer threads use it."""

from collections.abc import Sequence
from contextlib import ExitStack

from kvcommon.errors import LocalProtocolError
from kvcommon.layout import CacheLayout
from kvcommon.memory.page import ProgressPage
from kvworker.devices.base import Mapping
from kvworker.devices.pieces import GroupPieces
from kvworker.transfer.gate import Gate


class EngineMemory:
    """Mapping, layout and progress page of one attach.

    Made and closed by the map thread. Whoever touches the mapping or the page is inside ``gate``.
    """

    def __init__(
        self,
        mapping: Mapping,
        layout: CacheLayout,
        page: ProgressPage,
        resources: ExitStack,
        *,
        events: bool = False,
        direct: bool = False,
    ) -> None:
        """Take over an accepted attach; ``resources`` undoes all that was done for it."""
        self.mapping = mapping
        self.page = page
        #: The device can wait for the engine's events.
        self.events = events
        #: The store reads and writes the blocks itself; no staging memory is needed.
        self.direct = direct
        self.gate = Gate()
        #: By group id. Every byte was checked to lie inside its storage.
        self.groups = {group.group: GroupPieces(group, mapping.storages) for group in layout.groups}
        self._resources = resources

    def pieces(self, group: int) -> GroupPieces:
        """Return a group's pieces. Raises ``LocalProtocolError`` if there is no such group."""
        if group not in self.groups:
            raise LocalProtocolError(f"no group {group} in the layout; there are {[*self.groups]}")
        return self.groups[group]

    def pieces_for(
        self,
        group: int,
        layers: tuple[int, int],
        keys: Sequence[str],
        block_ids: Sequence[int],
    ) -> GroupPieces:
        """Return a group's pieces after checking what is about to be copied.

        Raises:
            LocalProtocolError: layers or blocks that do not exist, or not one block per key.
        """
        pieces = self.pieces(group)
        if len(keys) != len(block_ids) or not pieces.holds(*layers, block_ids):
            text = f"layers {layers} of blocks {block_ids} of group {group} for {len(keys)} keys"
            raise LocalProtocolError(f"{text}: outside the layout")
        return pieces

    def close(self) -> None:
        """Let go of everything, once nobody is inside. The map thread only. Idempotent."""
        self.gate.close()
        self.gate.wait_empty()
        self._resources.close()
