"""Which records are a reason to write an event log that is kept in memory."""

from collections.abc import Sequence

import msgspec

from kvcommon.messages import JobOutcome, JobsEnded, StoreHealth, StoreState
from kvworker.core.commands import SendToScheduler
from kvworker.core.events import PeerLost


def alarm(event: msgspec.Struct, commands: Sequence[msgspec.Struct]) -> str:
    """Say why a record is a reason to write; empty: it is none."""
    if isinstance(event, PeerLost):
        return f"the {event.role} side of {event.engine} is lost: {event.reason}"
    for command in commands:
        if not isinstance(command, SendToScheduler):
            continue
        body = command.body
        if isinstance(body, JobsEnded):
            for end in body.ends:
                if end.outcome is JobOutcome.FAILED:
                    return f"job {end.job_id} of {command.engine} failed: {end.reason}"
        elif isinstance(body, StoreHealth) and body.state is StoreState.DOWN:
            return f"store down: {body.reason}"
    return ""
