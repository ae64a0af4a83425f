"""Scheduler side → daemon, and the status client's question."""

import msgspec

from kvcommon.messages.base import Message


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the engine, as learnt from vLLM's handshake metadata."""

    rank: int
    #: Namespace fingerprint of what the rank stores (``kvcommon.keys``).
    fingerprint: str


class Hello(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The scheduler side opens (or reopens) its conversation. Answered by ``Welcome``."""

    #: Process id of the scheduler side, in the daemon's PID namespace if on its host; else 0.
    pid: int
    #: Every rank of the engine: a hit needs the part of each (rule 8).
    ranks: tuple[RankIdentity, ...]
    #: Jobs that the scheduler side believes open on this rank. The daemon answers ``JobsEnded``
    #: for those it does not know, so that nothing stays open over a lost connection.
    open_jobs: tuple[int, ...] = ()


class LookupGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one KV cache group to look for, in prefix order."""

    group: int
    block_hashes: tuple[bytes, ...]


class Lookup(Message, frozen=True, kw_only=True, omit_defaults=True):
    """How long a prefix of these blocks is stored for all ranks? → ``LookupResult``."""

    lookup_id: int
    request_id: str
    groups: tuple[LookupGroup, ...]


class ReleaseLookup(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The hit will not be used: let its lease and staging go."""

    lookup_id: int


class LoadJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bring blocks of one request from the store."""

    job_id: int
    request_id: str
    group: int
    #: Destination, one id per hash. The scheduler side holds a reference on each until every
    #: rank has reported the end of the job.
    block_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    #: True: the request computes in this very step and its layers wait on the progress page.
    #: False: between steps; the end is reported to the model side too.
    layerwise: bool
    lookup_id: int = 0


class SaveJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Store blocks of one request that are full after the step."""

    job_id: int
    request_id: str
    group: int
    block_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    #: True: the blocks were computed in earlier steps; every layer is readable once the step has
    #: begun. False: layer i is readable when ``LayersComputed`` says so.
    computed: bool = False


class StepPlan(Message, frozen=True, kw_only=True, omit_defaults=True):
    """All jobs of one step. Sent before vLLM ships the step. Answered by ``PlanAck``."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()


class StepVerdict(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The step's output came back from all ranks: end its saves, but revoke the tainted ones."""

    #: Save jobs whose request (or a request it shares blocks with) had a failed load.
    tainted: tuple[int, ...] = ()


class ResetStore(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Forget every stored object of this engine's namespaces (vLLM's reset with connector)."""


class StatusRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Anyone → daemon: how are you? Answered by ``Status``."""
