"""What the daemon's commands and events have in common: operations, engines and keys."""

from typing import Final

import msgspec

from kvcommon import messages as msg
from kvworker.core import commands as do
from kvworker.core import events as ev

#: Which event answers which command; each operation is answered exactly once.
ANSWERS: Final[dict[type, type]] = {
    do.MapEngine: ev.EngineMapped,
    do.UnmapEngine: ev.EngineUnmapped,
    do.FindKeys: ev.KeysFound,
    do.OpenPuts: ev.PutsOpened,
    do.WriteLayers: ev.LayersWritten,
    do.ClosePuts: ev.PutsClosed,
    do.OpenGets: ev.GetsOpened,
    do.LoadLayers: ev.LayersLoaded,
    do.CloseGets: ev.GetsClosed,
    do.ResetNamespace: ev.StoreReset,
    do.ProbeStore: ev.StoreProbed,
}
#: What ``run`` calls the request of jobs that it does on its own account.
OWN_REQUEST: Final = "kvreplay"
TERMINAL_EVENTS: Final = frozenset(ANSWERS.values())
#: A load or a save.
Job = msg.LoadJob | msg.SaveJob


def started_op(command: msgspec.Struct) -> int | None:
    """Return the operation that a command starts; None if it starts none."""
    return _op(command) if type(command) in ANSWERS else None


def ended_op(event: msgspec.Struct | None) -> int | None:
    """Return the operation that an event ends; None if it ends none."""
    return _op(event) if type(event) in TERMINAL_EVENTS else None


def engine_of(value: msgspec.Struct | None) -> str:
    """Return the engine key (``<engine id>#<rank>``) of an event or command; else nothing."""
    return str(getattr(value, "engine", ""))


def engine_id(key: str) -> str:
    """Return the engine of an engine key."""
    return key.rpartition("#")[0]


def rank_of(key: str) -> int:
    """Return the rank of an engine key; -1 if there is none."""
    rank = key.rpartition("#")[2]
    return int(rank) if rank.isdecimal() and len(rank) < 10 else -1


def keys_of(command: msgspec.Struct) -> tuple[str, ...]:
    """Return every store key that a command names."""
    if isinstance(command, do.ClosePuts):
        return command.end + command.revoke
    keys: tuple[str, ...] = getattr(command, "keys", ())
    return keys


def key_hash(key: str) -> str:
    """Return the block hash that ends a store key, in hexadecimal digits."""
    return key.rpartition("-")[2]


def key_mark(key: str) -> str:
    """Return the namespace fingerprint in a store key."""
    return "".join(key.split("-")[1:2])


def key_group(key: str) -> int:
    """Return the group in a store key; -1 if there is none."""
    group = "".join(key.split("-")[2:3])
    return int(group) if group.isdecimal() and len(group) < 10 else -1


def plan_jobs(plan: msg.StepPlan) -> list[Job]:
    """Return every job of a plan, loads first."""
    return [*plan.loads, *plan.saves]


def _op(value: msgspec.Struct | None) -> int | None:
    op = getattr(value, "op", None)
    return op if isinstance(op, int) else None
