"""Model side → daemon."""

from kvcommon.keys import Namespace
from kvcommon.layout import CacheLayout
from kvcommon.memory.handles import MemoryProof, PageHandle, StorageHandle
from kvcommon.messages.base import Message


class Attach(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Here is my KV cache: map it and serve me. Answered by ``Attached`` or ``Refused``.

    A second ``Attach`` of the same rank with another epoch replaces the first.
    """

    #: Process id of the model side (for pidfd), in the daemon's PID namespace.
    pid: int
    #: Device of the rank, for example ``cpu:0`` or ``npu:3``.
    device: str
    #: One handle per distinct storage, exported for this attach alone.
    storages: tuple[StorageHandle, ...]
    layout: CacheLayout
    #: The progress page, owned by the model side.
    page: PageHandle
    #: Identity of what this rank stores and loads.
    namespace: Namespace
    #: The daemon may drop this rank when nothing of it was heard for so long (ms); 0: never.
    lease_ms: int = 0
    #: To be read and answered before anything else, where the memory is a device's.
    proof: MemoryProof | None = None


class Detach(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Stop using my memory. Every open job of the rank ends as cancelled."""

    reason: str = ""


class StepBegun(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The model process has begun ``step``: earlier steps no longer touch any block.

    The gate of rule 5. Sent only for steps that have jobs.
    """

    #: Device event that says so (``kvcommon.memory.clock``); empty: it is so already.
    event: bytes = b""


class LayersComputed(Message, frozen=True, kw_only=True, omit_defaults=True):
    """In ``step`` the first ``num_layers`` layers (layer-table order) are written."""

    num_layers: int
    #: Device event that says so (``kvcommon.memory.clock``); empty: it is so already.
    event: bytes = b""


class CancelJobs(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Stop these jobs as soon as possible; each still ends exactly once."""

    job_ids: tuple[int, ...]
