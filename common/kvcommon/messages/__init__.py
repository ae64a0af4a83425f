"""Every message that crosses a process boundary, one tagged union per direction.

See ``docs/messages.md`` for the prose and ``docs/journey.md`` for one request followed through
all of them.
"""

from kvcommon.messages.base import PROTOCOL_VERSION, Envelope, Message
from kvcommon.messages.codec import (
    DaemonToModel,
    DaemonToScheduler,
    FromDaemon,
    ModelToDaemon,
    SchedulerToDaemon,
    ToDaemon,
    decode_from_daemon,
    decode_to_daemon,
    encode,
)
from kvcommon.messages.daemon import (
    EVENTS,
    Attached,
    GroupHit,
    JobEnd,
    JobOutcome,
    JobsEnded,
    LookupResult,
    PlanAck,
    Refused,
    Status,
    StoreHealth,
    StoreState,
    Welcome,
)
from kvcommon.messages.model import Attach, CancelJobs, Detach, LayersComputed, StepBegun
from kvcommon.messages.scheduler import (
    Hello,
    LoadJob,
    Lookup,
    LookupGroup,
    RankIdentity,
    ReleaseLookup,
    ResetStore,
    SaveJob,
    StatusRequest,
    StepPlan,
    StepVerdict,
)
from kvcommon.messages.shared import Heartbeat

__all__ = [
    "EVENTS",
    "PROTOCOL_VERSION",
    "Attach",
    "Attached",
    "CancelJobs",
    "DaemonToModel",
    "DaemonToScheduler",
    "Detach",
    "Envelope",
    "FromDaemon",
    "GroupHit",
    "Heartbeat",
    "Hello",
    "JobEnd",
    "JobOutcome",
    "JobsEnded",
    "LayersComputed",
    "LoadJob",
    "Lookup",
    "LookupGroup",
    "LookupResult",
    "Message",
    "ModelToDaemon",
    "PlanAck",
    "RankIdentity",
    "Refused",
    "ReleaseLookup",
    "ResetStore",
    "SaveJob",
    "SchedulerToDaemon",
    "Status",
    "StatusRequest",
    "StepBegun",
    "StepPlan",
    "StepVerdict",
    "StoreHealth",
    "StoreState",
    "ToDaemon",
    "Welcome",
    "decode_from_daemon",
    "decode_to_daemon",
    "encode",
]
