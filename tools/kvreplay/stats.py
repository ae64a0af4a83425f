"""``stats``: how often, how much, how fast and why not, in bounded memory."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvcommon import messages as msg
from kvcommon import reasons
from kvreplay.loading import Entry, LogSet
from kvreplay.merge import merge
from kvreplay.ops import ANSWERS, ended_op, plan_jobs, started_op
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import events as work

#: Buckets of a histogram per doubling: quantiles are right to about 5 %.
_PER_DOUBLING: Final = 8
#: Operations are named by their command.
_COMMAND_OF: Final = {event.__name__: command.__name__ for command, event in ANSWERS.items()}
#: Open starts of one phase that are remembered.
_MAX_OPEN: Final = 100_000


class Histogram:
    """Durations in logarithmic buckets."""

    def __init__(self) -> None:
        """No durations yet."""
        self._buckets: Counter[int] = Counter()
        self.num = 0
        self.max_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count one duration; negative ones (clocks of two hosts) count as 0."""
        duration_ns = max(duration_ns, 0)
        self._buckets[round(math.log2(duration_ns + 1) * _PER_DOUBLING)] += 1
        self.num += 1
        self.max_ns = max(self.max_ns, duration_ns)

    def quantile_ns(self, share: float) -> int:
        """Return the duration that this share of all does not exceed."""
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= share * self.num:
                return min(round(2 ** (bucket / _PER_DOUBLING) - 1), self.max_ns)
        return self.max_ns


@dataclass
class Stats:
    """What ``stats`` prints."""

    num_records: Counter[str] = field(default_factory=Counter)
    first_ns: int | None = None
    last_ns: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    #: Requests by what vLLM was told last: hit, or the reason of the miss.
    answers: Counter[str] = field(default_factory=Counter)
    #: Tokens that vLLM made room for, to be loaded; failed loads are among them.
    external_tokens: int = 0
    #: Ends of jobs on ranks: (load or save, outcome, reason).
    jobs: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    loaded_bytes: int = 0
    saved_bytes: int = 0
    #: Durations by phase.
    phases: dict[str, Histogram] = field(default_factory=dict)
    faults: int = 0
    problems: dict[str, list[str]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, object]:
        """What ``--json`` prints."""
        hits = self.answers["hit"]
        total = sum(self.answers.values())
        return {
            "records": dict(self.num_records),
            "seconds": round((self.last_ns - (self.first_ns or self.last_ns)) / 1e9, 6),
            "requests": self.num_requests,
            "tokens": self.num_tokens,
            "external_tokens": self.external_tokens,
            "hit_rate": hits / total if total else 0.0,
            "answers": dict(self.answers.most_common()),
            "jobs": [
                {"kind": kind, "outcome": outcome, "reason": reason, "num": num}
                for (kind, outcome, reason), num in sorted(self.jobs.items())
            ],
            "loaded_bytes": self.loaded_bytes,
            "saved_bytes": self.saved_bytes,
            "phases_ms": {
                name: {
                    "num": histogram.num,
                    "p50": histogram.quantile_ns(0.5) / 1e6,
                    "p95": histogram.quantile_ns(0.95) / 1e6,
                    "max": histogram.max_ns / 1e6,
                }
                for name, histogram in sorted(self.phases.items())
            },
            "faults": self.faults,
            "problems": self.problems,
            "unreadable": self.unreadable,
        }


def gather(logs: LogSet) -> Stats:
    """Read all logs once."""
    gatherer = _Gatherer()
    for entry in merge(logs.logs):
        gatherer.add(entry)
    stats = gatherer.finish()
    stats.problems = {log.label: log.problems for log in logs.logs if log.problems}
    stats.unreadable = logs.unreadable
    return stats


class _Gatherer:
    def __init__(self) -> None:
        self._stats = Stats()
        #: Starts of phases: (phase, log, id) → time.
        self._open: dict[tuple[str, str, int], int] = {}
        #: Whether a job is a load or a save, by log and id.
        self._kinds: dict[tuple[str, int], str] = {}
        #: Open jobs and whether they are loads or saves, by log and rank.
        self._jobs: dict[tuple[str, int], dict[int, str]] = {}
        #: Epoch of the daemon of a rank, by log and rank.
        self._epochs: dict[tuple[str, int], int] = {}
        #: Last answer of requests that vLLM still asks about.
        self._answers: dict[str, str] = {}

    def add(self, entry: Entry) -> None:
        stats = self._stats
        stats.num_records[entry.log] += 1
        stats.first_ns = entry.at_ns if stats.first_ns is None else stats.first_ns
        stats.last_ns = max(stats.last_ns, entry.at_ns)
        stats.faults += bool(entry.fault)
        op = ended_op(entry.event)
        if op is not None:
            self._close("op", entry, op, name=_COMMAND_OF.get(entry.kind, entry.kind))
        if entry.core == "kvsched":
            self._sched_event(entry)
        else:
            self._worker_event(entry.event)
        for command in entry.commands:
            self._command(entry, command)

    def finish(self) -> Stats:
        self._stats.answers.update(self._answers.values())
        return self._stats

    def _sched_event(self, entry: Entry) -> None:
        event, stats = entry.event, self._stats
        if isinstance(event, sched.RequestAdded):
            stats.num_requests += 1
            stats.num_tokens += event.num_tokens
        elif isinstance(event, sched.BlocksAllocated):
            stats.external_tokens += event.num_external_tokens
        elif isinstance(event, sched.RequestFinished):
            answer = self._answers.pop(event.request_id, None)
            if answer is not None:
                stats.answers[answer] += 1
        elif isinstance(event, sched.LookupAnswered):
            self._close("lookup", entry, event.result.lookup_id)
        elif isinstance(event, sched.PlanAcked):
            self._close("plan to ack", entry, _pair(event.step, event.rank))
        elif isinstance(event, sched.DaemonLost) and event.dead:
            self._died(entry.log, event.rank)
        elif isinstance(event, sched.DaemonReady):
            if self._epochs.setdefault((entry.log, event.rank), event.epoch) != event.epoch:
                self._died(entry.log, event.rank)
            self._epochs[entry.log, event.rank] = event.epoch
        elif isinstance(event, sched.JobsReported):
            for end in event.ends:
                kind = self._kinds.get((entry.log, end.job_id), "job")
                self._jobs.get((entry.log, event.rank), {}).pop(end.job_id, None)
                self._close(kind, entry, _pair(end.job_id, event.rank), name=f"{kind} job")
                stats.jobs[kind, end.outcome.value, end.reason] += 1

    def _died(self, log: str, rank: int) -> None:
        """A daemon is dead: what it had not ended has failed."""
        for kind in self._jobs.pop((log, rank), {}).values():
            self._stats.jobs[kind, msg.JobOutcome.FAILED.value, reasons.DAEMON_LOST] += 1

    def _worker_event(self, event: msgspec.Struct | None) -> None:
        if isinstance(event, work.LayersLoaded):
            self._stats.loaded_bytes += event.num_bytes
        elif isinstance(event, work.LayersWritten):
            self._stats.saved_bytes += sum(event.num_bytes)

    def _command(self, entry: Entry, command: msgspec.Struct) -> None:
        op = started_op(command)
        if op is not None:
            self._start("op", entry, op)
        elif isinstance(command, sched_do.AnswerMatch):
            if command.num_tokens is not None:
                told = "hit" if command.num_tokens else command.reason or "no reason"
                self._answers[command.request_id] = told
        elif isinstance(command, sched_do.SendToDaemon):
            if isinstance(command.body, msg.Lookup):
                self._start("lookup", entry, command.body.lookup_id)
            elif isinstance(command.body, msg.StepPlan):
                self._start("plan to ack", entry, _pair(command.body.step, command.rank))
                for job in plan_jobs(command.body):
                    kind = "load" if isinstance(job, msg.LoadJob) else "save"
                    self._kinds[entry.log, job.job_id] = kind
                    self._start(kind, entry, _pair(job.job_id, command.rank))
                    still = self._jobs.setdefault((entry.log, command.rank), {})
                    if len(still) < _MAX_OPEN:
                        still[job.job_id] = kind
                while len(self._kinds) > _MAX_OPEN:
                    del self._kinds[next(iter(self._kinds))]

    def _start(self, phase: str, entry: Entry, number: int) -> None:
        if len(self._open) >= _MAX_OPEN:
            del self._open[next(iter(self._open))]
        self._open[phase, entry.log, number] = entry.at_ns

    def _close(self, phase: str, entry: Entry, number: int, *, name: str = "") -> None:
        started = self._open.pop((phase, entry.log, number), None)
        if started is not None:
            histogram = self._stats.phases.setdefault(name or phase, Histogram())
            histogram.add(entry.at_ns - started)


def _pair(number: int, rank: int) -> int:
    """One number for a job or step on a rank."""
    return (number << 20) | (rank & 0xFFFFF)
