"""Which blocks of a request a step saves. Pure functions; the only place where that is decided.

Everything follows from vLLM's own ``num_computed_tokens`` and ``num_scheduled_tokens`` of the
step, never from a sum kept here: a failed load sets the former back.
"""

import math
from collections.abc import Container, Sequence

import msgspec

from kvsched.core.config import CoreConfig
from kvsched.core.events import ScheduledRequest
from kvsched.core.jobs import Ledger
from kvsched.core.requests import RequestRecord, SaveBar
from kvsched.core.steps import first_in

#: A request whose prompt is computed but could not be saved in so many steps is given up.
MAX_SKIPS = 256


class SavePart(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one request for one save job. Never empty."""

    first_block: int
    block_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    #: All were full before this step.
    computed: bool


class SavePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved of one request in one step."""

    parts: tuple[SavePart, ...]
    #: ``saved_until`` of the request if the plan is carried out.
    saved_until: int
    #: Blocks left out because the bound on held blocks is reached.
    num_skipped: int = 0
    #: Blocks left out because an open job must end, or a spoilt block be computed, before.
    num_deferred: int = 0


def block_limit(record: RequestRecord, config: CoreConfig) -> int:
    """How many blocks of this request can ever be saved, as far as known now."""
    if not config.can_save or record.abandoned:
        return 0
    prompt_blocks = record.num_prompt_tokens // config.block_size
    if config.save_decode:
        return max(prompt_blocks, len(record.hashes))
    return prompt_blocks


def full_blocks(scheduled: ScheduledRequest, config: CoreConfig) -> int:
    """How many blocks are full after the step."""
    tokens = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
    return tokens // config.block_size


def savable_end(record: RequestRecord, scheduled: ScheduledRequest, config: CoreConfig) -> int:
    """Blocks below this may be stored once the step is computed: full, hashed, with a block id.

    A hash exists only when all tokens of its block are confirmed, so optimistic counts (draft
    tokens, async scheduling) never lead to a block whose tokens may still change.
    """
    full = full_blocks(scheduled, config)
    return min(full, block_limit(record, config), len(record.hashes), len(record.blocks))


def rewrite(
    spoilt: dict[int, int],
    known: Sequence[tuple[RequestRecord, ScheduledRequest]],
    block_size: int,
) -> None:
    """Note in ``spoilt`` what a step writes anew from right values, and what from wrong ones.

    A block leaves it when all its tokens are written anew, in one step or several: vLLM may still
    have the block in its prefix cache, and a request that was preempted half way finds it there.
    Requests of one step may build on each other's blocks, in any order.
    """
    waiting = list(known) if spoilt else []
    changed = True
    while changed and waiting:
        changed = False
        for pair in list(waiting):
            if _rewrite_one(spoilt, *pair, block_size):
                waiting.remove(pair)
                changed = True
    for record, scheduled in waiting:
        start = scheduled.num_computed_tokens
        end = math.ceil((start + scheduled.num_scheduled_tokens) / block_size)
        for index, block_id in enumerate(record.blocks[:end]):
            if index >= start // block_size and block_id != 0:
                right = max(0, start - index * block_size)
                spoilt[block_id] = min(spoilt.get(block_id, block_size), right)


def _rewrite_one(
    spoilt: dict[int, int], record: RequestRecord, scheduled: ScheduledRequest, block_size: int
) -> bool:
    """Return False if the request builds on wrong values."""
    start = scheduled.num_computed_tokens
    end = start + scheduled.num_scheduled_tokens
    first = start // block_size
    if first_in(record.blocks[:first], spoilt) is not None:
        return False
    for index in range(first, math.ceil(end / block_size)):
        if index >= len(record.blocks):
            break
        right = spoilt.get(record.blocks[index])
        if right is None:
            continue
        if start - index * block_size > right:
            return False
        right = max(right, min(block_size, end - index * block_size))
        spoilt[record.blocks[index]] = right
        if right == block_size:
            del spoilt[record.blocks[index]]
    return True


def plan_saves(
    record: RequestRecord,
    scheduled: ScheduledRequest,
    config: CoreConfig,
    ledger: Ledger,
    spoilt: Container[int],
) -> SavePlan:
    """Decide what the step saves of one request.

    Blocks that the step completes are readable layer by layer while it runs. So are blocks that
    vLLM found in its own cache: another request may be computing them in this very step. Only
    blocks that this request itself had completed in an earlier step are ``computed``.
    """
    start = record.next_save
    end = savable_end(record, scheduled, config)
    if record.save_bar is not SaveBar.NONE or start >= end:
        return SavePlan(parts=(), saved_until=record.saved_until)
    earlier = min(record.full_seen, scheduled.num_computed_tokens // config.block_size)
    room = max(0, config.max_held_blocks - ledger.num_held_blocks)
    bad = first_in(record.blocks, spoilt)
    chosen: list[int] = []
    deferred = False
    stop = start
    while stop < end:
        saver = ledger.saver_of(record.hashes[stop])
        deferred = (
            (bad is not None and stop >= bad)
            # The load may yet fail.
            or ledger.is_loading(record.blocks[stop])
            # That save will be revoked; only then can the key be written again.
            or (saver is not None and saver.tainted)
        )
        if deferred:
            break
        if saver is None and record.blocks[stop] != 0:
            if len(chosen) == room:
                break
            chosen.append(stop)
        stop += 1
    parts = (
        _part(record, [i for i in chosen if i < earlier], computed=True),
        _part(record, [i for i in chosen if i >= earlier], computed=False),
    )
    return SavePlan(
        parts=tuple(part for part in parts if part is not None),
        saved_until=max(record.saved_until, stop),
        num_skipped=0 if deferred else end - stop,
        num_deferred=end - stop if deferred else 0,
    )


def _part(record: RequestRecord, indices: list[int], *, computed: bool) -> SavePart | None:
    if not indices:
        return None
    return SavePart(
        first_block=indices[0],
        block_ids=tuple(record.blocks[i] for i in indices),
        block_hashes=tuple(record.hashes[i] for i in indices),
        computed=computed,
    )
