"""One record per request: all that the core remembers about it.

A record is made when vLLM takes the request in and dropped when the request ends. Jobs and
lookups in flight outlive it and are never found by request id alone (a record has a serial).
"""

import dataclasses
import enum

import msgspec

from kvsched.core.states import LookupMove, LookupState, moved


class LookupRecord(msgspec.Struct, kw_only=True):
    """The lookup of one request. At most one at a time."""

    state: LookupState = LookupState.NONE
    #: 0 in state NONE.
    lookup_id: int = 0
    #: When it was sent, then when it was answered or timed out.
    since_ns: int = 0
    #: Blocks of the longest stored prefix.
    num_blocks: int = 0
    staged: bool = False
    reason: str = ""
    #: (local tokens, is it worth loading): asked again, the answer stays the same.
    judged: tuple[int, bool] | None = None

    def move(self, key: str, move: LookupMove) -> None:
        """Change the state along the table of ``states``."""
        self.state = moved(key, self.state, move)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The last positive answer to ``MatchAsked``: what vLLM may hold us to."""

    num_local_tokens: int
    #: Tokens beyond the local ones.
    num_tokens: int
    asynchronous: bool
    lookup_id: int


class PendingLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A load that vLLM has admitted and that the next step's plan will hold."""

    request_id: str
    serial: int
    #: Index in the request of the first block.
    first_block: int
    block_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    asynchronous: bool
    lookup_id: int
    #: The request has ended meanwhile; vLLM still waits for the end of the load.
    cancelled: bool = False


class SaveBar(enum.Enum):
    """Why a request's blocks may hold wrong bytes under right hashes: they are not saved."""

    NONE = enum.auto()
    #: A load failed that vLLM may not recover from correctly; over when the request starts again.
    UNTIL_REPLACED = enum.auto()
    #: The store was reset under the request; over when its blocks are gone.
    UNTIL_PREEMPTED = enum.auto()


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """State of one request."""

    request_id: str
    #: Tells apart two requests with the same id.
    serial: int
    #: Length when it was added: what counts as prompt.
    num_prompt_tokens: int
    #: Current length as far as known.
    num_tokens: int
    #: Hashes of its full blocks; only grows.
    hashes: list[bytes]
    skip_lookup: bool = False
    #: Its block table. Only appended to; replaced by another list when it changes otherwise, so
    #: that a list and a length are a snapshot.
    blocks: list[int] = dataclasses.field(default_factory=list)
    #: ``blocks`` is the table from its beginning: only then may something be appended to it.
    has_table: bool = False
    lookup: LookupRecord = dataclasses.field(default_factory=LookupRecord)
    offer: Offer | None = None
    #: Blocks below this are in the store, as a lookup or a load said.
    stored_until: int = 0
    #: Blocks below this are in save jobs, planned or ended.
    saved_until: int = 0
    #: Blocks below this were full after the last step that we saw of this block table.
    full_seen: int = 0
    #: A load of it failed: it is never loaded again.
    barred: bool = False
    save_bar: SaveBar = SaveBar.NONE
    #: Steps in which a save could not be planned although the prompt was computed.
    skips: int = 0
    #: Saving it was given up.
    abandoned: bool = False
    #: Job id of its asynchronous load in flight, or 0.
    async_job: int = 0
    #: Why the last ``MatchAsked`` was answered 0; counted when vLLM admits the request.
    last_reason: str = ""

    @property
    def next_save(self) -> int:
        """Index of the first block that is neither stored nor planned to be."""
        return max(self.stored_until, self.saved_until)

    def set_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Take over the whole block table."""
        self.has_table = True
        old = self.blocks
        if len(old) <= len(block_ids) and old == list(block_ids[: len(old)]):
            old.extend(block_ids[len(old) :])
        else:
            self.blocks = list(block_ids)

    def clear_blocks(self) -> None:
        """The block table is gone (preemption)."""
        self.blocks = []
        self.has_table = False
        self.full_seen = 0
        self.save_bar = SaveBar.NONE

    def set_hashes(self, hashes: tuple[bytes, ...]) -> bool:
        """Take over the whole list of hashes.

        Return False if it does not continue the old one: what was known of it is forgotten.
        """
        if self.hashes == list(hashes[: len(self.hashes)]):
            self.hashes.extend(hashes[len(self.hashes) :])
            return True
        self.hashes = list(hashes)
        self.stored_until = self.saved_until = self.full_seen = 0
        return False

    def roll_back(self, first_block: int) -> None:
        """Blocks from ``first_block`` on are not what they were taken for."""
        self.stored_until = min(self.stored_until, first_block)
        self.saved_until = min(self.saved_until, first_block)
        self.full_seen = min(self.full_seen, first_block)
