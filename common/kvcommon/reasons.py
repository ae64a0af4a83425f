"""The words that say why something went as it did; ``docs/reasons.md`` explains each.

Every ``reason`` field of a message, event or command holds one of these words, or nothing. A word
never changes its meaning; a new one is added here and to the page in one change.
"""

from typing import Final

#: Lookup: the first block that is not part of the hit has never been stored for every rank.
NOT_STORED: Final = "not-stored"
#: The block was there (this process stored or saw it) and the store has dropped it since.
EVICTED: Final = "evicted"
#: The daemon did not answer a lookup before its deadline; vLLM was told 0.
LOOKUP_TIMEOUT: Final = "lookup-timeout"
#: The breaker in front of the store is open.
STORE_DOWN: Final = "store-down"
#: The daemon of some rank is gone or cannot be reached.
DAEMON_LOST: Final = "daemon-lost"
#: The daemon of some rank has not (yet) mapped the model side's memory.
DAEMON_NOT_ATTACHED: Final = "daemon-not-attached"
#: A hit that is shorter than the policy's bound: computing is cheaper than loading.
NOT_WORTH_LOADING: Final = "not-worth-loading"
#: The engine's role in a prefill/decode split, or its configuration, forbids it.
ROLE: Final = "role"
#: The request has no full block that could be loaded or saved.
TOO_SHORT: Final = "too-short"
#: vLLM already holds on the device all that is stored.
ALREADY_LOCAL: Final = "already-local"
#: A load of this request failed before, so it is computed (no loops, rule 3).
LOAD_FAILED_BEFORE: Final = "load-failed-before"
#: The store had no room for the object.
STORE_FULL: Final = "store-full"
#: The object is stored already, or is being stored by somebody else.
EXISTS: Final = "exists"
#: The session's lease ran out before the transfer was complete.
EXPIRED: Final = "expired"
#: The store or the network failed while bytes were moved.
TRANSFER_FAILED: Final = "transfer-failed"
#: The step had a failed load, so what it computed must not be published (rule 3).
TAINTED: Final = "tainted"
#: The job was given up on request: abort, detach, shutdown.
CANCELLED: Final = "cancelled"
#: The engine's process ended, or its conversation with the daemon broke.
ENGINE_LOST: Final = "engine-lost"
#: A bound was reached (held blocks, staging, queue): the job was not done, and counted.
OVERLOAD: Final = "overload"
#: The answer came after its deadline, when it was no longer of use.
LATE: Final = "late"
#: The plan names a step, group or block that this rank does not have: a bug of one side.
BAD_PLAN: Final = "bad-plan"

#: Every word, in the order of ``docs/reasons.md``.
REASONS: Final[tuple[str, ...]] = (
    NOT_STORED,
    EVICTED,
    LOOKUP_TIMEOUT,
    STORE_DOWN,
    DAEMON_LOST,
    DAEMON_NOT_ATTACHED,
    NOT_WORTH_LOADING,
    ROLE,
    TOO_SHORT,
    ALREADY_LOCAL,
    LOAD_FAILED_BEFORE,
    STORE_FULL,
    EXISTS,
    EXPIRED,
    TRANSFER_FAILED,
    TAINTED,
    CANCELLED,
    ENGINE_LOST,
    OVERLOAD,
    LATE,
    BAD_PLAN,
)
