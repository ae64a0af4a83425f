"""Daemon → model side, daemon → scheduler side, and the answer to the status client."""

import enum

import msgspec

from kvcommon.messages.base import Message

#: Capability: the daemon waits for the device events in ``StepBegun`` and ``LayersComputed``.
EVENTS = "events"


class Attached(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The rank's memory is mapped, and the read-back check passed in both directions."""

    #: Process id of the daemon, for pidfd.
    pid: int
    #: What the daemon can do with this device: ``direct`` (copies without staging) or ``staging``,
    #: and ``events``.
    capabilities: tuple[str, ...] = ()
    #: For a person: how this rank's namespace differs from the nearest that the daemon has served,
    #: one field per line; empty if it is the same or the first. A difference means no shared hits.
    differences: tuple[str, ...] = ()


class Refused(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The daemon will not serve the sender; ``reason`` says why and ``remedy`` what to do."""

    reason: str
    remedy: str = ""
    differences: tuple[str, ...] = ()
    #: True: only this conversation is out of step (restart, sequence gap, unknown peer): say
    #: ``Hello`` or ``Attach`` again. False: trying again will not help.
    resync: bool = False


class JobOutcome(str, enum.Enum):
    """How a job ended; each job ends exactly once per rank (rule 2)."""

    DONE = "done"
    #: Nothing to do: every block was already stored, or is being stored by somebody else.
    SKIPPED = "skipped"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of one job on one rank."""

    job_id: int
    outcome: JobOutcome
    #: Loads: destination blocks whose bytes are not what was asked for. Saves: blocks not stored.
    failed_blocks: tuple[int, ...] = ()
    #: Bytes moved by this job.
    num_bytes: int = 0
    #: From the first to the last byte, microseconds.
    duration_us: int = 0
    #: One word of ``docs/reasons.md`` for every block that failed or was skipped, else empty.
    reason: str = ""


class JobsEnded(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Jobs have ended on this rank. To the scheduler side for every job; to the model side for
    every load (of a layerwise one it reads the message only if the progress page says *failed*)."""

    ends: tuple[JobEnd, ...]


class Welcome(Message, frozen=True, kw_only=True, omit_defaults=True):
    """State of the daemon as to this rank. Sent again whenever ``attached`` changes."""

    #: Process id of the daemon, for pidfd; 0 if on another host.
    pid: int
    device: str
    #: The rank's model side is mapped: lookups and plans are served.
    attached: bool
    store: str = ""
    #: Directory of the daemon's event log, absolute; empty if it keeps none. A scheduler side on
    #: the same host that was not told of a directory of its own logs there too.
    event_log: str = ""


class GroupHit(msgspec.Struct, frozen=True, kw_only=True):
    """Longest stored prefix of one group."""

    group: int
    num_blocks: int


class LookupResult(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to ``Lookup``. A hit holds the store's lease for a while (10 s by default)."""

    lookup_id: int
    hits: tuple[GroupHit, ...]
    #: Every block of the hit is in this daemon's memory under a lease: its load cannot miss.
    staged: bool = False
    #: Why the hit is shorter than asked: a word of ``docs/reasons.md``; empty if it is not.
    reason: str = ""


class PlanAck(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The plan of ``step`` was taken in; each of its jobs will end."""


class StoreState(str, enum.Enum):
    """What the breaker in front of the store thinks of it."""

    UP = "up"
    DOWN = "down"


class StoreHealth(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The store came up or went down. While it is down lookups answer 0 and saves are dropped."""

    state: StoreState
    reason: str = ""


class Status(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The daemon as a person wants to see it (``kvworker status``)."""

    pid: int
    device: str
    store: str
    store_state: StoreState = StoreState.UP
    version: str = ""
    uptime_s: float = 0.0
    endpoint: str = ""
    #: One entry per rank that is or was attached: free-form columns, name → text or number.
    engines: tuple[dict[str, str | int | float | bool], ...] = ()
    #: Last ended jobs, newest first, at most 32: free-form columns.
    recent: tuple[dict[str, str | int | float | bool], ...] = ()
    #: Counters and gauges by metric name (``docs/metrics.md``).
    metrics: dict[str, float] = {}
    #: Directory of the event log, absolute; empty if it keeps none.
    event_log: str = ""
