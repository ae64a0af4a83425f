"""``trace``: a Chrome trace (Perfetto opens it): tracks of operations and layers by process, and of
requests.

Slices are operations, from their command to their event; layers of a load are slices of their own;
steps are markers; arrows lead from a plan of the scheduler side to the operations that it caused.
"""

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TextIO

import msgspec

from kvcommon import messages as msg
from kvreplay.fates import Fates
from kvreplay.links import Mentions
from kvreplay.loading import Entry, LogSet
from kvreplay.merge import merge
from kvreplay.ops import ended_op, engine_id, engine_of, rank_of, started_op
from kvreplay.trace_requests import RequestTracks
from kvreplay.words import command_text, event_text
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work

TraceEvent = dict[str, object]
#: Microseconds that a decision without a duration is drawn with.
_POINT_US: Final = 1.0
_JOB_OPS: Final = (work_do.OpenGets, work_do.OpenPuts, work_do.LoadLayers, work_do.WriteLayers)


@dataclass
class _Running:
    """An operation that has not ended."""

    command: msgspec.Struct
    started_ns: int
    track: int
    requests: frozenset[str]
    flow: int | None


@dataclass
class _Tracks:
    """Tracks of one process: each kind has as many lanes as run at once."""

    pid: int
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    #: Lanes of each kind that were in use and are free again, the lowest first.
    _free: dict[str, list[int]] = field(default_factory=dict)
    #: How many lanes each kind has, and which lane a track is.
    _num_lanes: dict[str, int] = field(default_factory=dict)
    _lanes: dict[int, int] = field(default_factory=dict)

    def take(self, kind: str) -> tuple[int, bool]:
        """Return a free track for the kind, and whether it is new."""
        free = self._free.setdefault(kind, [])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = self._num_lanes.get(kind, 0)
            self._num_lanes[kind] = lane + 1
        track, new = self.number(kind, lane)
        self._lanes[track] = lane
        return track, new

    def number(self, kind: str, lane: int = 0) -> tuple[int, bool]:
        """Return the number of a track, and whether it is new."""
        new = (kind, lane) not in self.numbers
        return self.numbers.setdefault((kind, lane), len(self.numbers) + 1), new

    def give_back(self, kind: str, track: int) -> None:
        """The operation on this track has ended."""
        lane = self._lanes.pop(track, None)
        if lane is not None:
            heapq.heappush(self._free.setdefault(kind, []), lane)


def write_trace(logs: LogSet, out: TextIO) -> int:
    """Write the trace; return the number of its events."""
    num_events = 0
    out.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for event in trace_events(logs):
        out.write(",\n" if num_events else "\n")
        out.write(json.dumps(event))
        num_events += 1
    out.write("\n]}\n")
    return num_events


def trace_events(logs: LogSet) -> Iterator[TraceEvent]:
    """Yield the trace's events; memory is bounded by what runs at once."""
    return _Tracer(logs).events()


class _Tracer:
    def __init__(self, logs: LogSet) -> None:
        self._logs = logs
        self._tracks = {log.label: _Tracks(number + 1) for number, log in enumerate(logs.logs)}
        self._running: dict[tuple[str, int], _Running] = {}
        #: Flow of a plan by engine, step and rank; the newest plans only.
        self._flows: dict[tuple[str, int, int], int] = {}
        self._num_flows = 0
        self._mentions = Mentions()
        self._start_ns: int | None = None
        self._fates = Fates(logs.logs)
        #: Time of the newest record, of all logs and of each.
        self._last_ns = 0
        self._last_of: dict[str, int] = {}

    def events(self) -> Iterator[TraceEvent]:
        for log in self._logs.logs:
            pid = self._tracks[log.label].pid
            name = {"name": f"{log.label} (pid {log.header.pid})"}
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": name}
        drawn = RequestTracks(len(self._tracks) + 1)
        for entry in merge(self._logs.logs):
            if self._start_ns is None:
                self._start_ns = entry.at_ns
            self._last_ns = self._last_of[entry.log] = entry.at_ns
            self._fates.add(entry)
            requests = self._mentions.of(entry)
            op = ended_op(entry.event)
            if op is not None:
                yield from self._end(entry, op)
            yield from self._marks(entry)
            yield from drawn.take(entry, self._us(entry.at_ns))
            for command in entry.commands:
                yield from self._command(entry, command, requests)
        ends = {label: self._end_of(label) for label in self._tracks}
        for (label, _), running in self._running.items():
            end_ns, how = ends[label]
            yield self._slice(label, running, end_ns, {"open": how})
        yield from drawn.rest({one: (self._us(at_ns), how) for one, (at_ns, how) in ends.items()})

    def _end_of(self, label: str) -> tuple[int, str]:
        """Until when something of a log that has no end is drawn, and what that is called."""
        dead_ns = self._fates.seen_dead_ns(label)
        if dead_ns is None:
            return self._last_ns, "not ended in these logs"
        return max(dead_ns, self._last_of.get(label, 0)), "it ended with its process"

    def _us(self, at_ns: int) -> float:
        return (at_ns - (self._start_ns or 0)) / 1000

    def _track(self, label: str, kind: str, *, take: bool = False) -> Iterator[TraceEvent]:
        """Name a track when it is first used."""
        tracks = self._tracks[label]
        number, new = tracks.take(kind) if take else tracks.number(kind)
        if new:
            pid, args = tracks.pid, {"name": kind}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": args}
        self._last_track = number

    def _command(
        self, entry: Entry, command: msgspec.Struct, requests: frozenset[str]
    ) -> Iterator[TraceEvent]:
        if isinstance(command, sched_do.SendToDaemon) and isinstance(command.body, msg.StepPlan):
            yield from self._plan(entry, command.rank, command.body)
        op = started_op(command)
        if op is None:
            return
        yield from self._track(entry.log, type(command).__name__, take=True)
        flow = None
        if isinstance(command, _JOB_OPS):
            key = engine_of(command)
            flow = self._flows.get((engine_id(key), command.step, rank_of(key)))
        running = _Running(command, entry.at_ns, self._last_track, requests, flow)
        self._running[entry.log, op] = running

    def _plan(self, entry: Entry, rank: int, plan: msg.StepPlan) -> Iterator[TraceEvent]:
        """A plan leaves: a small slice that arrows begin at."""
        yield from self._track(entry.log, "plans")
        self._num_flows += 1
        self._flows[entry.engine, plan.step, rank] = self._num_flows
        if len(self._flows) > 1024:
            del self._flows[next(iter(self._flows))]
        place = {"pid": self._tracks[entry.log].pid, "tid": self._last_track}
        at_us = self._us(entry.at_ns)
        args = {"rank": rank, "loads": len(plan.loads), "saves": len(plan.saves)}
        yield {
            "ph": "X",
            "name": f"plan of step {plan.step}",
            "cat": "plan",
            "ts": at_us,
            "dur": _POINT_US,
            "args": args,
            **place,
        }
        yield {
            "ph": "s",
            "name": "plan",
            "cat": "plan",
            "id": self._num_flows,
            "ts": at_us,
            **place,
        }

    def _end(self, entry: Entry, op: int) -> Iterator[TraceEvent]:
        running = self._running.pop((entry.log, op), None)
        if running is None:
            return
        kind = type(running.command).__name__
        self._tracks[entry.log].give_back(kind, running.track)
        event = entry.event
        args: dict[str, object] = {"result": event_text(event)}
        began_ns = getattr(event, "started_ns", 0)
        if began_ns:
            waited_ns = began_ns + self._shift(entry) - running.started_ns
            args["waited_us"] = max(waited_ns, 0) / 1000
        yield self._slice(entry.log, running, entry.at_ns, args)
        if running.flow is not None:
            yield {
                "ph": "f",
                "bp": "e",
                "name": "plan",
                "cat": "plan",
                "id": running.flow,
                "ts": self._us(running.started_ns),
                "pid": self._tracks[entry.log].pid,
                "tid": running.track,
            }
        if isinstance(event, work.LayersLoaded) and event.layer_ns:
            yield from self._layers(entry, running, event)

    def _layers(
        self, entry: Entry, running: _Running, event: work.LayersLoaded
    ) -> Iterator[TraceEvent]:
        first = getattr(running.command, "first_layer", 0)
        shift = self._shift(entry)
        begin = max(event.started_ns + shift if event.started_ns else 0, running.started_ns)
        yield from self._track(entry.log, f"layers (lane {running.track})")
        for number, at_ns in enumerate(event.layer_ns):
            end = max(at_ns + shift, begin)
            yield {
                "ph": "X",
                "name": f"layer {first + number}",
                "cat": "layer",
                "ts": self._us(begin),
                "dur": (end - begin) / 1000,
                "pid": self._tracks[entry.log].pid,
                "tid": self._last_track,
                "args": {"step": getattr(running.command, "step", 0)},
            }
            begin = end

    def _slice(
        self, label: str, running: _Running, end_ns: int, args: dict[str, object]
    ) -> TraceEvent:
        return {
            "ph": "X",
            "name": type(running.command).__name__,
            "cat": "op",
            "ts": self._us(running.started_ns),
            "dur": max(end_ns - running.started_ns, 0) / 1000,
            "pid": self._tracks[label].pid,
            "tid": running.track,
            "args": {
                "what": command_text(running.command),
                "requests": ", ".join(sorted(running.requests)),
                **args,
            },
        }

    def _marks(self, entry: Entry) -> Iterator[TraceEvent]:
        """Markers of steps, and of what goes wrong."""
        event, text = entry.event, ""
        if isinstance(event, (sched.StepScheduled, sched.StepFinished)):
            text = (
                f"step {event.step} {'finished' if entry.kind == 'StepFinished' else 'scheduled'}"
            )
        elif isinstance(event, work.ModelSaid) and isinstance(event.body, msg.StepBegun):
            text = f"step {event.body.step} begun"
        elif isinstance(event, work.ModelSaid) and isinstance(event.body, msg.LayersComputed):
            text = f"step {event.body.step}: {event.body.num_layers} layers computed"
        elif isinstance(event, (sched.DaemonLost, sched.StoreChanged, work.PeerLost)):
            text = event_text(event)
        if entry.fault:
            text = f"core failed: {entry.fault}"
        if not text:
            return
        yield from self._track(entry.log, "steps")
        yield {
            "ph": "i",
            "s": "p",
            "name": text,
            "ts": self._us(entry.at_ns),
            "pid": self._tracks[entry.log].pid,
            "tid": self._last_track,
            "args": {"record": entry.stimulus},
        }

    def _shift(self, entry: Entry) -> int:
        log = self._logs.named(entry.log)
        return 0 if log is None else log.shift_ns
