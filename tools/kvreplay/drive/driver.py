"""Plays daemons' logs to real daemons, in recorded order, and compares what comes of it.

A recorded message is said again only once everything that the daemons had answered before it in the
recording has been answered again; so the order of cause and effect is that of the recording at any
pace. A daemon that died in the recording is killed behind its last record. Every wait is bounded.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Final

from kvcommon import messages as msg
from kvcommon.errors import ConfigError
from kvcommon.ids import new_epoch
from kvcommon.keys import fingerprint
from kvreplay.drive.errands import Errands
from kvreplay.drive.errors import DriveError
from kvreplay.drive.needs import Needs, find_needs, has_session, renamed
from kvreplay.drive.outcomes import Item, recorded
from kvreplay.drive.stage import Options, Played, Stage
from kvreplay.fates import Fates
from kvreplay.loading import Entry, Log
from kvreplay.merge import merge
from kvreplay.ops import plan_jobs
from kvworker.core import events as work

#: An answer that may have to wait for what is said next is waited for so long first.
_PATIENCE_S: Final = 1.0
#: A daemon that is to be killed works on for as long as it had in the recording, at most so long.
_LAST_S: Final = 0.5
#: A run that fails gets so long to remove what it has stored.
_GRACE_S: Final = 15.0

_Said = work.SchedulerSaid | work.ModelSaid | work.PeerLost


class Driver:
    """One run."""

    def __init__(self, logs: Sequence[Log], options: Options) -> None:
        """Take logs; those of scheduler sides tell which daemons were seen to die.

        Raises:
            DriveError: there is no log of a daemon.
        """
        self._every = list(logs)
        self._logs = [log for log in logs if log.header.core == "kvworker"]
        if not self._logs:
            raise DriveError(
                "no log of a daemon is among these: a run plays what daemons were told"
            )
        self._options = options
        self._stage = Stage(self._logs, options)
        self._errands = Errands(self._stage)
        self._epochs: dict[tuple[str, str, int], int] = {}
        self._marks: dict[str, str] = {}
        #: Number of the last record of each log whose daemon died.
        self._deaths: dict[str, int] = {}
        #: Logs of daemons that opened put sessions, as not every one does on Mooncake.
        self._layerwise: set[str] = set()
        #: When each log's daemon was told something last, in the recording.
        self._told_ns: dict[str, int] = {}
        #: Answers that the recording has had by now, and those that wait for what is said next.
        self._pending: list[Item] = []
        self._late: list[Item] = []
        #: What ``only`` lets through.
        self._jobs: set[tuple[str, int]] = set()
        self._steps: set[tuple[str, int]] = set()
        self._lookups: set[tuple[str, int]] = set()

    def play(self) -> Played:
        """Play everything.

        Raises:
            DriveError: a daemon does not start, ends, or falls out of step; or time is up.
        """
        began = time.monotonic()
        stage = self._stage
        needs = self._read()
        for mark, attach in needs.attaches.items():
            self._marks[mark] = fingerprint(renamed(attach.namespace, stage.word))
        played = False
        try:
            self._entries(needs)
            for rank in stage.ranks.values():
                rank.check_released()
            self._errands.audit()
            played = True
        finally:
            self._leave(patient=played)
        stage.played.seconds = time.monotonic() - began
        return stage.played

    def _leave(self, *, patient: bool) -> None:
        """Leave nothing behind; what went wrong before is more interesting than what does here."""
        try:
            if not patient:
                self._stage.grant(_GRACE_S)
            with contextlib.suppress(DriveError, ConfigError):
                self._errands.remove(patient=patient)
        finally:
            self._stage.close()

    # -- the recording -------------------------------------------------------------------------

    def _read(self) -> Needs:
        """Read everything once: what there was before, and who died."""
        fates = Fates(self._every)
        last: dict[str, int] = {}

        def daemons() -> Iterator[Entry]:
            for entry in merge(self._every):
                fates.add(entry)
                if entry.core == "kvworker":
                    last[entry.log] = entry.seq
                    self._layerwise |= {entry.log} if has_session(entry.event) else set()
                    yield entry

        needs = find_needs(daemons(), self._options.only)
        self._deaths = {label: seq for label, seq in last.items() if fates.has_died(label)}
        return needs

    def _entries(self, needs: Needs) -> None:
        first_ns: int | None = None
        began = time.monotonic()
        played = self._stage.played
        for entry in merge(self._logs):
            if entry.log not in self._stage.daemons:
                self._start(entry.log, needs)
                began = began if first_ns is not None else time.monotonic()
            first_ns = entry.at_ns if first_ns is None else first_ns
            offset_ns = entry.at_ns - first_ns
            if self._options.until_ns is not None and offset_ns > self._options.until_ns:
                break
            played.recorded_seconds = offset_ns / 1e9
            if isinstance(entry.event, _Said):
                self._wait_for_answers()
                if self._options.speed > 0:
                    self._stage.wait_until(began + offset_ns / 1e9 / self._options.speed)
                self._say(entry, entry.event)
                self._told_ns[entry.log] = entry.at_ns
            for item, what in recorded(entry):
                if self._is_wanted(item):
                    played.tally.expected[item] = what
                    self._pending.append(item)
            if entry.seq == self._deaths.get(entry.log):
                self._die(entry)
        self._wait_for_answers()

    def _start(self, label: str, needs: Needs) -> None:
        """Start the daemon of a log, once the one before it has answered all that it had."""
        self._wait_for_answers()
        layerwise = label in self._layerwise
        self._stage.start(label, ["--save", "layerwise"] if layerwise else [])
        for mark, owner in needs.logs.items():
            if owner == label:
                self._errands.seed(label, needs, mark)

    def _die(self, entry: Entry) -> None:
        """A daemon was killed behind this record."""
        self._wait_for_answers()
        told_ns = self._told_ns.get(entry.log, entry.at_ns)
        # What it had been told last it has begun, and so shall this one.
        self._stage.wait_for(lambda: False, min((entry.at_ns - told_ns) / 1e9, _LAST_S))
        self._stage.end(entry.log, killed=True)

    def _say(self, entry: Entry, event: _Said) -> None:
        stage = self._stage
        rank = stage.rank(entry.log, event.engine)
        stage.played.num_said += 1
        if isinstance(event, work.PeerLost):
            rank.lose(event.role)
            return
        key = (event.engine, type(event).__name__, event.epoch)
        epoch = self._epochs.setdefault(key, new_epoch())
        body: msg.Message | None = event.body
        if isinstance(body, msg.Attach):
            rank.attach(body, epoch)
            stage.wait(lambda: rank.attached is not None, f"{rank.name} is not attached")
        elif isinstance(body, msg.Hello):
            rank.hello(body, epoch, self._marks)
        elif isinstance(event, work.SchedulerSaid):
            body = self._wanted(event)
            if body is not None:
                rank.scheduler(body)
        else:
            if isinstance(body, msg.LayersComputed):
                step, layers = body.step, body.num_layers
                what = f"{rank.name}: layers of step {step} are not loaded"
                stage.wait(lambda: rank.layers_ready(step, layers), what)
            assert body is not None
            rank.model(body)

    def _wanted(self, event: work.SchedulerSaid) -> msg.Message | None:
        """Return what is to be said of a message, with ``only``: the request's part."""
        body, only = event.body, self._options.only
        if only is None:
            return body
        if isinstance(body, msg.Lookup) and body.request_id == only:
            self._lookups.add((event.engine, body.lookup_id))
            return body
        if isinstance(body, msg.StepPlan):
            mine = {job.job_id for job in plan_jobs(body) if job.request_id == only}
            self._jobs |= {(event.engine, job) for job in mine}
            self._steps |= {(event.engine, body.step)} if mine else set()
            loads = tuple(job for job in body.loads if job.job_id in mine)
            saves = tuple(job for job in body.saves if job.job_id in mine)
            return msg.StepPlan(step=body.step, loads=loads, saves=saves) if mine else None
        if isinstance(body, msg.StepVerdict) and (event.engine, body.step) in self._steps:
            return body
        return body if isinstance(body, msg.ResetStore) else None

    def _is_wanted(self, item: Item) -> bool:
        if self._options.only is None:
            return True
        return (item.engine, item.number) in {
            "job": self._jobs,
            "plan": self._steps,
            "lookup": self._lookups,
        }.get(item.kind, set())

    # -- answers -------------------------------------------------------------------------------

    def _wait_for_answers(self) -> None:
        """Wait for what the recording has an answer to by now.

        A job that goes another way than in the recording may end only after what is said next: one
        that is not put off would keep that from being said.
        """
        pending, self._pending = self._pending, []
        self._late = [item for item in self._late if not self._is_over(item)]
        for item in pending:
            if not self._has_answer(item, _PATIENCE_S) and not self._is_over(item):
                self._late.append(item)

    def _is_over(self, item: Item) -> bool:
        """Wait for an answer, unless it waits for us; tell whether it needs no more waiting."""
        if self._has_answer(item, 0.0):
            return True
        if item.kind == "job":
            rank = self._stage.ranks.get((item.log, item.engine))
            if rank is not None and rank.waits_for_us(item.number):
                return False
        found = self._stage.tally.found
        self._stage.wait(lambda: item in found, f"{item} has no answer")
        found.setdefault(item, "no answer")
        return True

    def _has_answer(self, item: Item, limit_s: float) -> bool:
        found = self._stage.tally.found
        return self._stage.wait_for(lambda: item in found, limit_s)
