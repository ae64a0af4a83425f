"""What the scheduler side's core is told. Past tense; plain data; recorded as they are.

Only what matters to the cache is told: a step in which nothing is to be loaded, saved or tracked
makes no event. Block ids, lists and hashes are those of the one KV cache group unless they are
tuples by group.
"""

from typing import Union

import msgspec

from kvcommon.messages import JobEnd, LookupResult, RankIdentity


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of the core's events."""

    #: Monotonic time at which the shell saw it, nanoseconds. The core's only clock.
    now_ns: int


class Ticked(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Time has passed: look at deadlines."""

    #: (rank, milliseconds) of the daemons that have been silent for a while, although heartbeats
    #: were due and we listened.
    silent_ms: tuple[tuple[int, int], ...] = ()


class RanksKnown(Event, frozen=True, kw_only=True, omit_defaults=True):
    """vLLM's handshake has named every rank of the engine."""

    ranks: tuple[RankIdentity, ...]


class DaemonReady(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A ``Welcome`` arrived. Another epoch than before means that the old process is gone."""

    rank: int
    epoch: int
    attached: bool
    store: str = ""


class DaemonLost(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A daemon cannot be reached. ``dead``: its process is known to be gone, so it will never
    touch a block again; otherwise its blocks stay referenced."""

    rank: int
    dead: bool
    reason: str


class FenceFailed(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A daemon that should be killed cannot be: another user's, another host's, not surely it."""

    rank: int
    reason: str


class StoreChanged(Event, frozen=True, kw_only=True, omit_defaults=True):
    """``StoreHealth`` of one rank's daemon."""

    rank: int
    up: bool
    reason: str = ""


class RequestAdded(Event, frozen=True, kw_only=True, omit_defaults=True):
    """vLLM has taken in a request (``on_new_request``)."""

    request_id: str
    num_tokens: int
    #: vLLM's hashes of the full blocks so far.
    block_hashes: tuple[bytes, ...]
    #: vLLM was told not to read a prefix cache for it.
    skip_lookup: bool = False


class MatchAsked(Event, frozen=True, kw_only=True, omit_defaults=True):
    """``get_num_new_matched_tokens``: answered by exactly one ``AnswerMatch``.

    Asked again every step until the request is admitted; asking has no side effects beyond the
    first lookup. ``block_hashes`` is only given if the request was not added before or has grown
    since (a resumed request has generated tokens).
    """

    request_id: str
    num_tokens: int
    #: Tokens that vLLM already has on the device, a multiple of the block size.
    num_local_tokens: int
    block_hashes: tuple[bytes, ...] = ()


class BlocksAllocated(Event, frozen=True, kw_only=True, omit_defaults=True):
    """``update_state_after_alloc``: vLLM admitted the request.

    ``num_external_tokens`` alone says what is to be loaded; it may be less than was answered, and
    0 releases the lookup. Comes twice for an asynchronous load, the second time with 0.
    """

    request_id: str
    #: All blocks of the request, in order.
    block_ids: tuple[int, ...]
    num_external_tokens: int


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a step, as far as the core needs it."""

    request_id: str
    #: Tokens computed before this step. Can be less than last time: a failed load rolls back.
    num_computed_tokens: int
    num_scheduled_tokens: int
    #: True: ``block_ids`` is the whole list (new or resumed); False: it is appended.
    replace: bool
    block_ids: tuple[int, ...] = ()
    #: Hashes that became known since the last time, appended (decode).
    new_block_hashes: tuple[bytes, ...] = ()


class StepScheduled(Event, frozen=True, kw_only=True, omit_defaults=True):
    """``build_connector_meta``: the step is decided. Answered by a ``StepPlan`` per rank if there
    are jobs and, if the model side has anything to do, one ``TellModel``."""

    step: int
    requests: tuple[ScheduledRequest, ...] = ()
    #: Requests that lost their blocks since the last step.
    preempted: tuple[str, ...] = ()


class StepFinished(Event, frozen=True, kw_only=True, omit_defaults=True):
    """``update_connector_output``: the step's output came back from all ranks."""

    step: int
    #: Blocks whose load failed on any rank, as vLLM has been told.
    invalid_block_ids: tuple[int, ...] = ()


class RequestFinished(Event, frozen=True, kw_only=True, omit_defaults=True):
    """``request_finished``: on any end, also if never scheduled."""

    request_id: str


class LookupAnswered(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A daemon answered a lookup."""

    rank: int
    result: LookupResult


class PlanAcked(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A daemon took in the plan of a step."""

    rank: int
    step: int


class JobsReported(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A daemon reported the end of jobs on its rank."""

    rank: int
    ends: tuple[JobEnd, ...]


class ResetAsked(Event, frozen=True, kw_only=True, omit_defaults=True):
    """vLLM's ``reset_cache``: forget what is stored."""


SchedEvent = Union[
    Ticked,
    RanksKnown,
    DaemonReady,
    DaemonLost,
    FenceFailed,
    StoreChanged,
    RequestAdded,
    MatchAsked,
    BlocksAllocated,
    StepScheduled,
    StepFinished,
    RequestFinished,
    LookupAnswered,
    PlanAcked,
    JobsReported,
    ResetAsked,
]
