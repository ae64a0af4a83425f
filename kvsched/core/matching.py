"""From a new request to its admitted load: lookups, answers, leases.

One lookup per request is asked for at first sight; ``MatchAsked`` is answered from it as often as
vLLM cares to ask. A hit holds a lease in the store until a load takes it over or it is released.
"""

import math

from kvcommon.errors import LocalProtocolError
from kvcommon.messages import Lookup, LookupGroup, LookupResult, ReleaseLookup
from kvcommon.reasons import (
    ALREADY_LOCAL,
    LOAD_FAILED_BEFORE,
    LOOKUP_TIMEOUT,
    NOT_STORED,
    NOT_WORTH_LOADING,
    ROLE,
    TOO_SHORT,
)
from kvsched.core.commands import AnswerMatch, SchedCommand, SendToDaemon
from kvsched.core.events import BlocksAllocated, LookupAnswered, MatchAsked, RequestAdded
from kvsched.core.requests import LookupRecord, Offer, PendingLoad, RequestRecord
from kvsched.core.state import CoreState
from kvsched.core.states import LookupMove, LookupState

#: The one KV cache group that is served.
GROUP = 0


def usable_tokens(num_tokens: int) -> int:
    """Tokens of a request that may come from a cache: vLLM must compute at least the last one.

    The only place where the request's length is capped.
    """
    return max(0, num_tokens - 1)


def loadable_blocks(num_tokens: int, num_hashes: int, block_size: int) -> int:
    """Full blocks that could be of use; only full blocks are ever stored or loaded."""
    return min(num_hashes, math.ceil(usable_tokens(num_tokens) / block_size))


def hit_tokens(num_blocks: int, num_tokens: int, block_size: int) -> int:
    """Tokens that a stored prefix of ``num_blocks`` saves computing."""
    return min(num_blocks * block_size, usable_tokens(num_tokens))


class Matcher:
    """Lookups and the answers made of them."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._next_id = 1
        #: Unanswered lookup → request.
        self._waiting: dict[int, str] = {}

    def added(self, event: RequestAdded) -> list[SchedCommand]:
        """Take a request in and look it up."""
        record = self._state.add_request(
            event.request_id, event.num_tokens, event.block_hashes, skip_lookup=event.skip_lookup
        )
        return [] if self._obstacle(record) else [self._send(record, event.now_ns)]

    def asked(self, event: MatchAsked) -> list[SchedCommand]:
        """Answer ``get_num_new_matched_tokens``."""
        commands: list[SchedCommand] = []
        record = self._state.requests.get(event.request_id)
        if record is None:
            record = self._state.add_request(
                event.request_id, event.num_tokens, event.block_hashes, skip_lookup=False
            )
        elif event.block_hashes:
            if not record.set_hashes(event.block_hashes):
                commands += self.drop(record)
            self._state.refresh_active(record)
        record.num_tokens = event.num_tokens
        record.offer = None
        reason = self._obstacle(record)
        if reason:
            return [*commands, _nothing(record, reason)]
        commands += self._aged(record, event.now_ns)
        if record.lookup.state is LookupState.NONE:
            commands.append(self._send(record, event.now_ns))
        if record.lookup.state is LookupState.PENDING:
            return [*commands, AnswerMatch(request_id=record.request_id, num_tokens=None)]
        return [*commands, self._answer(record, event.num_local_tokens)]

    def only_waits(self, request_id: str, num_tokens: int, now_ns: int) -> bool:
        """Tell whether ``asked`` would change nothing, and say "ask again"."""
        record = self._state.requests.get(request_id)
        return (
            record is not None
            and record.lookup.state is LookupState.PENDING
            and now_ns - record.lookup.since_ns < self._state.config.lookup_timeout_ns
            and record.num_tokens == num_tokens
            and record.offer is None
            and not self._obstacle(record)
        )

    def answered(self, event: LookupAnswered) -> list[SchedCommand]:
        """A daemon answered. Too late: nobody will use the hit, so its lease is given back."""
        result = event.result
        num_blocks = sum(hit.num_blocks for hit in result.hits if hit.group == GROUP)
        request_id = self._waiting.pop(result.lookup_id, None)
        if request_id is None:
            self._state.counters["lookups_late"] += 1
            if num_blocks == 0:
                return []
            body = ReleaseLookup(lookup_id=result.lookup_id)
            return [SendToDaemon(rank=event.rank, body=body)]
        record = self._state.requests[request_id]
        self._take(record, result, num_blocks, event.now_ns)
        self._state.refresh_active(record)
        return []

    def allocated(self, event: BlocksAllocated) -> list[SchedCommand]:
        """VLLM admitted the request: plan its load, or let its hit go.

        Raises:
            LocalProtocolError: vLLM counts on tokens that were never offered; nothing has changed.
        """
        record = self._state.requests.get(event.request_id)
        if event.num_external_tokens > 0:
            return self._plan_load(record, event)
        if record is None:
            return []
        record.set_blocks(event.block_ids)
        self._state.admitted[record.request_id] = None
        if record.offer is not None:
            self._state.counters["hits_unused"] += 1
        elif record.last_reason:
            self._state.counters[f"misses.{record.last_reason}"] += 1
        record.offer = None
        record.last_reason = ""
        self._state.refresh_active(record)
        return self.drop(record)

    def drop(self, record: RequestRecord) -> list[SchedCommand]:
        """Forget the request's lookup; a hit's lease is given back."""
        commands: list[SchedCommand] = []
        if record.lookup.state is LookupState.HIT:
            commands = self.release(record.lookup.lookup_id)
        self._forget(record)
        return commands

    def release(self, lookup_id: int) -> list[SchedCommand]:
        """Give a hit's lease back, if its daemon can be reached."""
        ranks = self._state.ranks
        body = ReleaseLookup(lookup_id=lookup_id)
        return [*self._state.send_all([ranks.get(ranks.lookup_rank)], body)]

    def forget_all(self) -> None:
        """The daemon that answered is gone, and with it every lease."""
        for record in self._state.requests.values():
            self._forget(record)

    def validate(self) -> None:
        """Assert that every pending lookup belongs to one request, and the reverse."""
        pending: dict[int, str] = {}
        for record in self._state.requests.values():
            lookup = record.lookup
            assert (lookup.lookup_id == 0) == (lookup.state is LookupState.NONE), lookup
            assert lookup.lookup_id < self._next_id, lookup
            if lookup.state is LookupState.PENDING:
                assert lookup.lookup_id not in pending, lookup
                pending[lookup.lookup_id] = record.request_id
        assert pending == self._waiting, (pending, self._waiting)

    def _obstacle(self, record: RequestRecord) -> str:
        """Say why this request cannot load anything now, whatever is stored."""
        config = self._state.config
        if not config.can_load or record.skip_lookup:
            return ROLE
        if record.barred:
            return LOAD_FAILED_BEFORE
        if loadable_blocks(record.num_tokens, len(record.hashes), config.block_size) == 0:
            return TOO_SHORT
        return self._state.ranks.obstacle()

    def _send(self, record: RequestRecord, now_ns: int) -> SendToDaemon:
        config = self._state.config
        count = loadable_blocks(record.num_tokens, len(record.hashes), config.block_size)
        record.lookup.move(record.request_id, LookupMove.SEND)
        record.lookup.lookup_id = self._next_id
        record.lookup.since_ns = now_ns
        self._waiting[self._next_id] = record.request_id
        self._next_id += 1
        self._state.counters["lookups"] += 1
        group = LookupGroup(group=GROUP, block_hashes=tuple(record.hashes[:count]))
        body = Lookup(
            lookup_id=record.lookup.lookup_id, request_id=record.request_id, groups=(group,)
        )
        return SendToDaemon(rank=self._state.ranks.lookup_rank, body=body)

    def _take(
        self, record: RequestRecord, result: LookupResult, num_blocks: int, now_ns: int
    ) -> None:
        lookup = record.lookup
        lookup.since_ns = now_ns
        lookup.reason = result.reason
        if num_blocks == 0:
            lookup.move(record.request_id, LookupMove.FIND_NOTHING)
            return
        lookup.move(record.request_id, LookupMove.FIND)
        lookup.num_blocks = min(num_blocks, len(record.hashes))
        lookup.staged = result.staged
        record.stored_until = max(record.stored_until, lookup.num_blocks)
        self._state.counters["lookup_hits"] += 1

    def _aged(self, record: RequestRecord, now_ns: int) -> list[SchedCommand]:
        """Time out a pending lookup; drop an answer that is too old to rely on."""
        config, lookup = self._state.config, record.lookup
        age_ns = now_ns - lookup.since_ns
        if lookup.state is LookupState.PENDING:
            if age_ns >= config.lookup_timeout_ns:
                lookup.move(record.request_id, LookupMove.TIME_OUT)
                lookup.since_ns = now_ns
                del self._waiting[lookup.lookup_id]
                self._state.counters["lookup_timeouts"] += 1
            return []
        return self.drop(record) if age_ns >= config.lookup_fresh_ns else []

    def _answer(self, record: RequestRecord, num_local: int) -> AnswerMatch:
        """Make the answer from an answered (or timed out) lookup."""
        config, lookup = self._state.config, record.lookup
        if lookup.state is LookupState.TIMED_OUT:
            return _nothing(record, LOOKUP_TIMEOUT)
        if lookup.state is LookupState.MISS:
            return _nothing(record, lookup.reason or NOT_STORED)
        stored = hit_tokens(lookup.num_blocks, record.num_tokens, config.block_size)
        if stored <= num_local:
            return _nothing(record, ALREADY_LOCAL)
        if not self._is_worth(lookup, stored, num_local):
            return _nothing(record, NOT_WORTH_LOADING)
        # Staged or not: whatever lies in a daemon's memory is lost with the daemon, and a load
        # within a step must not fail then unless vLLM recovers from that correctly.
        layerwise = config.load == "layerwise" or (config.load == "auto" and config.sync_is_safe)
        record.last_reason = ""
        record.offer = Offer(
            num_local_tokens=num_local,
            num_tokens=stored - num_local,
            asynchronous=not layerwise,
            lookup_id=lookup.lookup_id,
        )
        return AnswerMatch(
            request_id=record.request_id,
            num_tokens=stored - num_local,
            asynchronous=not layerwise,
        )

    def _is_worth(self, lookup: LookupRecord, stored: int, num_local: int) -> bool:
        config = self._state.config
        gain = stored - num_local
        num_blocks = math.ceil(stored / config.block_size) - num_local // config.block_size
        if num_blocks < config.min_load_blocks or (num_local > 0 and gain < config.block_size):
            # The second: a prompt of whole blocks that vLLM has but for the last, which it never
            # takes from its own cache. Asked every time; never worth a load.
            return False
        if config.load != "auto":
            return True
        if lookup.judged is None or lookup.judged[0] != num_local:
            lookup.judged = (num_local, self._state.worth.judge(num_blocks, gain))
        return lookup.judged[1]

    def _plan_load(
        self, record: RequestRecord | None, event: BlocksAllocated
    ) -> list[SchedCommand]:
        """Turn an offer that vLLM took up, perhaps in part, into a load for the next plan."""
        offer = record.offer if record is not None else None
        if record is None or offer is None or event.num_external_tokens > offer.num_tokens:
            raise LocalProtocolError(
                f"{event.request_id}: vLLM counts on {event.num_external_tokens} external tokens;"
                f" {offer.num_tokens if offer else 0} were offered"
            )
        size = self._state.config.block_size
        first = offer.num_local_tokens // size
        end = math.ceil((offer.num_local_tokens + event.num_external_tokens) / size)
        if end > len(event.block_ids):
            raise LocalProtocolError(
                f"{event.request_id}: {len(event.block_ids)} blocks for a load up to block {end}"
            )
        record.set_blocks(event.block_ids)
        self._state.admitted[record.request_id] = None
        record.offer = None
        self._state.counters["hit_tokens"] += event.num_external_tokens
        self._state.pending[event.request_id] = PendingLoad(
            request_id=event.request_id,
            serial=record.serial,
            first_block=first,
            block_ids=event.block_ids[first:end],
            block_hashes=tuple(record.hashes[first:end]),
            asynchronous=offer.asynchronous,
            lookup_id=offer.lookup_id,
        )
        if record.lookup.lookup_id == offer.lookup_id:
            self._forget(record)  # the load has taken the lease over
        self._state.refresh_active(record)
        return []

    def _forget(self, record: RequestRecord) -> None:
        if record.lookup.state is not LookupState.NONE:
            self._waiting.pop(record.lookup.lookup_id, None)
            record.lookup.move(record.request_id, LookupMove.DROP)
            record.lookup = LookupRecord()


def _nothing(record: RequestRecord, reason: str) -> AnswerMatch:
    record.last_reason = reason
    return AnswerMatch(request_id=record.request_id, num_tokens=0, reason=reason)
