"""Lookups: how long a prefix is stored for all ranks? One store call each, each answered once."""

from functools import partial
from typing import NamedTuple

from kvcommon import reasons
from kvcommon.ids import BlockHash, Fingerprint
from kvcommon.keys import store_key
from kvcommon.messages import GroupHit, Lookup, LookupResult
from kvworker.core.breaker import Breaker
from kvworker.core.commands import FindKeys
from kvworker.core.engines import Engine
from kvworker.core.events import KeysFound
from kvworker.core.kernel import Kernel
from kvworker.outcome import Outcome


class LookupKey(NamedTuple):
    """Names a lookup for ever."""

    engine: str
    #: Of the scheduler side that asked.
    epoch: int
    lookup_id: int


class Lookups:
    """All lookups in flight.

    A hit holds nothing but the store's own lease, so releasing one needs no work.
    """

    def __init__(self, kernel: Kernel, breaker: Breaker) -> None:
        self._kernel = kernel
        self._breaker = breaker
        #: Lookup → op in flight.
        self.open: dict[LookupKey, int] = {}

    def ask(self, engine: Engine, lookup: Lookup) -> None:
        """Begin a lookup, or answer it at once if the store cannot or need not be asked."""
        key = LookupKey(engine.key, engine.scheduler_epoch, lookup.lookup_id)
        if key in self.open:
            self._kernel.count("protocol_errors", what="repeated-lookup")
            return
        reason = self._obstacle(engine)
        # By group, block and rank: the first key that is missing ends its group's prefix.
        keys = tuple(
            store_key(Fingerprint(rank.fingerprint), wanted.group, BlockHash(block_hash))
            for wanted in lookup.groups
            for block_hash in wanted.block_hashes
            for rank in engine.ranks
        )
        if reason or not keys:
            if not reason and any(wanted.block_hashes for wanted in lookup.groups):
                reason = reasons.DAEMON_NOT_ATTACHED
            self._reply(engine, lookup, (0,) * len(lookup.groups), reason)
            return
        num_ranks = len(engine.ranks)
        command = FindKeys(op=self._kernel.next_op(), engine=engine.key, keys=keys)
        self.open[key] = self._kernel.start(
            command, partial(self._found, engine, key, lookup, num_ranks)
        )

    def release(self, _lookup_id: int) -> None:
        """The hit is not used. Legal at any time, also for a lookup that nobody knows."""
        self._kernel.count("lookups_released")

    def _obstacle(self, engine: Engine) -> str:
        """Say why the store is not asked, if it is not."""
        if not engine.attached:
            return reasons.DAEMON_NOT_ATTACHED
        if self._breaker.down:
            return reasons.STORE_DOWN
        if engine.reset_prefixes:
            # What is stored is about to be removed.
            return reasons.NOT_STORED
        if len(self.open) >= self._kernel.config.max_lookups:
            return reasons.OVERLOAD
        return ""

    def _found(
        self, engine: Engine, key: LookupKey, lookup: Lookup, num_ranks: int, event: KeysFound
    ) -> None:
        self._breaker.note(event.outcomes)
        del self.open[key]
        if key.epoch != engine.scheduler_epoch:
            return
        reason = "" if engine.attached else reasons.DAEMON_NOT_ATTACHED
        lengths, at = [], 0
        for wanted in lookup.groups:
            length = 0
            end = at + num_ranks * len(wanted.block_hashes)
            for first in range(at, end, num_ranks):
                outcomes = event.outcomes[first : first + num_ranks]
                if any(outcome is not Outcome.OK for outcome in outcomes):
                    down = Outcome.DOWN in outcomes
                    reason = reason or (reasons.STORE_DOWN if down else reasons.NOT_STORED)
                    break
                length += 1
            lengths.append(length if engine.attached else 0)
            at = end
        self._reply(engine, lookup, tuple(lengths), reason, local=event.local)

    def _reply(
        self,
        engine: Engine,
        lookup: Lookup,
        lengths: tuple[int, ...],
        reason: str,
        *,
        local: bool = False,
    ) -> None:
        """Answer the scheduler side."""
        groups = zip(lookup.groups, lengths, strict=True)
        result = LookupResult(
            step=lookup.step,
            lookup_id=lookup.lookup_id,
            hits=tuple(
                GroupHit(group=wanted.group, num_blocks=length) for wanted, length in groups
            ),
            staged=local and any(lengths),
            reason=reason,
        )
        self._kernel.count("lookups", reason=reason)
        self._kernel.count("lookup_blocks", sum(len(g.block_hashes) for g in lookup.groups))
        self._kernel.count("lookup_hit_blocks", sum(lengths))
        self._kernel.to_scheduler(engine.key, result)
