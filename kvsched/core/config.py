"""Configuration of the scheduler side's core: everything that its decisions depend on.

It is written into the header of the event log, so that a replay can build the same core.
"""

from typing import Literal

import msgspec

#: How vLLM is asked to take a hit; ``ConnectorConfig.load``.
LoadMode = Literal["auto", "layerwise", "async"]

_NS_PER_MS = 1_000_000


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one ``SchedCore``. Fields are never renamed: old logs hold them."""

    #: Tokens in a block of the (one) KV cache group.
    block_size: int = 16
    #: Blocks in vLLM's pool; ids run from 0, and 0 is the null block.
    num_blocks: int = 1024
    load: LoadMode = "auto"
    #: Roles of the engine: a producer only saves, a consumer only loads.
    can_load: bool = True
    can_save: bool = True
    #: Save what is generated too, not only prompts.
    save_decode: bool = False
    #: A synchronous load that fails is recovered correctly: no async scheduling and no model
    #: runner V2, or vLLM's policy is ``fail``.
    sync_is_safe: bool = False
    #: A lookup that is not answered for so long counts as a miss.
    lookup_timeout_ms: float = 100.0
    #: An answer to a lookup may be used for so long; then the request is looked up again. Well
    #: below the store's lease (10 s).
    lookup_fresh_ms: float = 5000.0
    #: A daemon that does not acknowledge a plan for so long is not served until it does.
    ack_timeout_ms: float = 2000.0
    #: A daemon that has been silent for so long while jobs are open on it is fenced.
    fence_timeout_ms: float = 8000.0
    #: Kept by the model side; here so that a log tells what it was.
    load_timeout_ms: float = 5000.0
    #: No save is planned that would bring the blocks referenced by open jobs above this.
    max_held_blocks: int = 256
    #: A hit that loads fewer blocks is not used.
    min_load_blocks: int = 1
    #: Bytes of one block in one rank's cache, all layers; 0: not known, so every load is worth it.
    num_bytes_per_block: int = 0
    #: Check every invariant after every event (slow).
    validate: bool = False

    @property
    def lookup_timeout_ns(self) -> int:
        """``lookup_timeout_ms`` in the core's clock."""
        return int(self.lookup_timeout_ms * _NS_PER_MS)

    @property
    def lookup_fresh_ns(self) -> int:
        """``lookup_fresh_ms`` in the core's clock."""
        return int(self.lookup_fresh_ms * _NS_PER_MS)

    @property
    def ack_timeout_ns(self) -> int:
        """``ack_timeout_ms`` in the core's clock."""
        return int(self.ack_timeout_ms * _NS_PER_MS)
