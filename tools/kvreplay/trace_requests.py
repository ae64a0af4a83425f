"""Requests in a trace: one track for each that lives, with its lookup and its loads inside.

Tracks are used again when their request has ended, so there are as many as requests lived at once.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvcommon import messages as msg
from kvreplay.loading import Entry
from kvreplay.ops import plan_jobs
from kvsched.core import commands as sched_do
from kvsched.core import events as sched

TraceEvent = dict[str, object]
#: Requests that live at once and are drawn; more are left out.
_MAX_LIVE: Final = 4096


@dataclass
class _Live:
    track: int
    began_us: float
    num_tokens: int
    told: str = ""
    #: Open spans inside, by what they wait for.
    inside: dict[tuple[str, int], float] = field(default_factory=dict)


class RequestTracks:
    """Draws the requests of scheduler sides as one process of the trace."""

    def __init__(self, pid: int) -> None:
        """``pid`` is the process's number in the trace."""
        self._pid = pid
        self._live: dict[tuple[str, str], _Live] = {}
        #: Tracks that nobody uses, the lowest first.
        self._free: list[int] = []
        self._num_tracks = 0
        #: Lookup or job → request, by log.
        self._owners: dict[tuple[str, str, int], str] = {}

    def take(self, entry: Entry, at_us: float) -> Iterator[TraceEvent]:
        """Take in the next record; yield what is complete now."""
        if entry.core != "kvsched":
            return
        event = entry.event
        if isinstance(event, (sched.RequestAdded, sched.MatchAsked)):
            yield from self._begin(entry.log, event.request_id, event.num_tokens, at_us)
        elif isinstance(event, sched.LookupAnswered):
            yield from self._inner(entry.log, "lookup", event.result.lookup_id, at_us)
        elif isinstance(event, sched.JobsReported):
            for end in event.ends:
                yield from self._inner(entry.log, "load", end.job_id, at_us)
        for command in entry.commands:
            self._command(entry.log, command, at_us)
        if isinstance(event, sched.RequestFinished):
            yield from self._end(entry.log, event.request_id, at_us, "finished")

    def rest(self, ends: Mapping[str, tuple[float, str]]) -> Iterator[TraceEvent]:
        """Yield what has not ended when the logs do.

        Args:
            ends: of each log: until when its requests are drawn, and what that is called.
        """
        for log, request in list(self._live):
            yield from self._end(log, request, *ends[log])

    def _begin(self, log: str, request: str, num_tokens: int, at_us: float) -> Iterator[TraceEvent]:
        if (log, request) in self._live or len(self._live) >= _MAX_LIVE:
            return
        if not self._free:
            self._num_tracks += 1
            self._free.append(self._num_tracks)
            if self._num_tracks == 1:
                yield self._name("process_name", 0, "requests")
            yield self._name("thread_name", self._num_tracks, f"request lane {self._num_tracks}")
        track = heapq.heappop(self._free)
        self._live[log, request] = _Live(track, at_us, num_tokens)

    def _command(self, log: str, command: object, at_us: float) -> None:
        if isinstance(command, sched_do.AnswerMatch) and command.num_tokens is not None:
            live = self._live.get((log, command.request_id))
            if live is not None:
                live.told = f"{command.num_tokens} tokens {command.reason}".strip()
        if not isinstance(command, sched_do.SendToDaemon):
            return
        body = command.body
        if isinstance(body, msg.Lookup):
            self._open(log, body.request_id, ("lookup", body.lookup_id), at_us)
        elif isinstance(body, msg.StepPlan):
            for job in plan_jobs(body):
                if isinstance(job, msg.LoadJob):
                    self._open(log, job.request_id, ("load", job.job_id), at_us)

    def _open(self, log: str, request: str, what: tuple[str, int], at_us: float) -> None:
        live = self._live.get((log, request))
        if live is not None:
            live.inside.setdefault(what, at_us)
            self._owners[log, what[0], what[1]] = request

    def _inner(self, log: str, kind: str, number: int, at_us: float) -> Iterator[TraceEvent]:
        request = self._owners.pop((log, kind, number), None)
        live = self._live.get((log, request or ""))
        began_us = live.inside.pop((kind, number), None) if live is not None else None
        if live is not None and began_us is not None:
            yield self._slice(live.track, f"{kind} {number}", began_us, at_us, {})

    def _end(self, log: str, request: str, at_us: float, how: str) -> Iterator[TraceEvent]:
        live = self._live.pop((log, request), None)
        if live is None:
            return
        for kind, number in list(live.inside):
            self._owners.pop((log, kind, number), None)
        heapq.heappush(self._free, live.track)
        args = {"log": log, "tokens": live.num_tokens, "vLLM was told": live.told, "end": how}
        yield self._slice(live.track, request, live.began_us, at_us, args)

    def _name(self, what: str, track: int, name: str) -> TraceEvent:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": track, "args": {"name": name}}

    def _slice(
        self, track: int, name: str, began_us: float, end_us: float, args: dict[str, object]
    ) -> TraceEvent:
        return {
            "ph": "X",
            "name": name,
            "cat": "request",
            "ts": began_us,
            "dur": max(end_us - began_us, 0.0),
            "pid": self._pid,
            "tid": track,
            "args": args,
        }
