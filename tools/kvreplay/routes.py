"""Which of many requests a record may belong to, without asking each of them.

Every number that ties records to a request (``RequestLinks.claims``) leads back to it. A record is
handed to those whom its numbers lead to; only what touches everybody who lives (a lost daemon, say)
goes to all. Work is in proportion to what is handed over, not to how many live.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from kvcommon import messages as msg
from kvreplay.links import Claim, RequestLinks
from kvreplay.loading import Entry
from kvreplay.ops import plan_jobs
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work

#: Events, commands and messages that may touch any request that lives.
_FOR_ALL: Final = (
    sched.DaemonReady,
    sched.DaemonLost,
    sched.FenceFailed,
    sched.StoreChanged,
    sched_do.FenceDaemon,
    work.PeerLost,
    msg.Attach,
    msg.Detach,
)
_NOBODY: Final[frozenset[str]] = frozenset()


class Routes:
    """Numbers, and the requests that have claimed them."""

    def __init__(self) -> None:
        """Nobody has claimed anything."""
        self._of_claim: dict[Claim, set[str]] = {}
        self._of_request: dict[str, list[Claim]] = {}
        #: Requests with an open load: what vLLM says of blocks, and what closes get sessions, has
        #: no other number.
        self._loading: set[str] = set()

    def follow(self, links: RequestLinks) -> None:
        """Lead records to a request that lives by what has been tied to it since the last time."""
        request = links.request_id
        mine = self._of_request.setdefault(request, [])
        for one in links.claims:
            self._of_claim.setdefault(one, set()).add(request)
            mine.append(one)
        links.claims.clear()
        if links.is_loading:
            self._loading.add(request)
        else:
            self._loading.discard(request)

    def forget(self, request: str) -> None:
        """Lead nothing to a request any more."""
        self._loading.discard(request)
        for one in self._of_request.pop(request, ()):
            others = self._of_claim.get(one, set())
            others.discard(request)
            if not others:
                self._of_claim.pop(one, None)

    def of(self, entry: Entry) -> set[str] | None:
        """Return whose a record may be though it does not name them; None: anybody's."""
        values = (entry.event, *entry.commands)
        if any(_is_for_all(entry, value) for value in values):
            return None
        found: set[str] = set()
        for value in values:
            for one in _numbers(entry.log, value):
                found |= self._of_claim.get(one, _NOBODY)
            invalid = isinstance(value, sched.StepFinished) and value.invalid_block_ids
            if invalid or isinstance(value, work_do.CloseGets):
                found |= self._loading
            if isinstance(value, sched.StepScheduled):
                found |= set(value.preempted)
        return found


def _is_for_all(entry: Entry, value: msgspec.Struct | None) -> bool:
    if isinstance(value, work_do.FindKeys):
        # What a lookup asks for is its request's; at any other time it may be anybody's.
        return not isinstance(entry.event, work.SchedulerSaid)
    return isinstance(value, _FOR_ALL) or isinstance(getattr(value, "body", None), _FOR_ALL)


def _numbers(log: str, value: msgspec.Struct | None) -> Iterator[Claim]:
    """Yield the numbers in an event or a command, and in the message in it."""
    body = getattr(value, "body", value)
    if isinstance(body, sched.LookupAnswered):
        body = body.result
    for name, kind in (("lookup_id", "lookup"), ("job_id", "job"), ("step", "step")):
        number = getattr(body, name, None)
        if isinstance(number, int):
            yield kind, number
    jobs: tuple[int, ...] = ()
    if isinstance(body, (msg.JobsEnded, sched.JobsReported)):
        jobs = tuple(end.job_id for end in body.ends)
    elif isinstance(body, msg.StepPlan):
        jobs = tuple(job.job_id for job in plan_jobs(body))
    elif isinstance(body, msg.CancelJobs):
        jobs = body.job_ids
    elif isinstance(body, sched_do.TellModel):
        jobs = (*(load.job_id for load in body.loads), *body.cancel)
    yield from (("job", job) for job in jobs)
    op = getattr(value, "op", None)
    if isinstance(op, int):
        yield log, op
