"""Plays daemons' logs to real daemons, in recorded order, and compares what comes of it.

A recorded message is said again only once everything that the daemons had answered before it in the
recording has been answered again; so the order of cause and effect is that of the recording at any
pace. Every wait is bounded.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvcommon import messages as msg
from kvcommon.ids import new_epoch
from kvcommon.keys import fingerprint
from kvreplay.drive.daemon import KVWORKER, Daemon
from kvreplay.drive.errors import DriveError
from kvreplay.drive.link import Links
from kvreplay.drive.needs import Needs, find_needs, renamed
from kvreplay.drive.outcomes import Item, Tally, describe, recorded
from kvreplay.drive.rank import Rank, Setting, load_job, save_job
from kvreplay.loading import Entry, Log
from kvreplay.merge import merge
from kvreplay.ops import key_group, key_hash, plan_jobs
from kvworker.core import events as work

_LOOK_S: Final = 0.05
#: While a layerwise load runs, its progress is looked at so often.
_WATCH_S: Final = 0.001
#: Blocks of one step that stores or checks objects on its own account.
_BATCH: Final = 64


@dataclass(frozen=True)
class Options:
    """How to play."""

    #: Directory for run directory and new logs; short, it holds sockets.
    directory: Path
    #: Options of ``kvworker serve`` that name the store.
    store: Sequence[str] = ("--store", "memory")
    #: 1: as recorded, 2: twice as fast; 0: as fast as possible.
    speed: float = 0.0
    #: Stop at this offset of the recording.
    until_ns: int | None = None
    #: Play only what this request needs.
    only: str | None = None
    seed: int = 0
    #: How long an answer may take, and the whole run.
    answer_s: float = 20.0
    limit_s: float = 600.0
    #: What is run as ``kvworker``.
    program: Sequence[str] = KVWORKER


@dataclass
class Played:
    """What came of a run."""

    tally: Tally = field(default_factory=Tally)
    num_said: int = 0
    seconds: float = 0.0
    recorded_seconds: float = 0.0
    #: Objects stored before the recording began, and objects read back at its end.
    num_seeded: int = 0
    num_audited: int = 0
    notes: list[str] = field(default_factory=list)


class Driver:
    """One run."""

    def __init__(self, logs: Sequence[Log], options: Options) -> None:
        """Take the logs of daemons.

        Raises:
            DriveError: there is none, or none that begins at its start.
        """
        self._logs = [log for log in logs if log.header.core == "kvworker"]
        if not self._logs:
            raise DriveError(
                "no log of a daemon is among these: a run plays what daemons were told"
            )
        self._options = options
        self._played = Played()
        self._links = Links()
        self._word = f"{new_epoch():x}"
        self._daemons: dict[str, Daemon] = {}
        self._devices: dict[str, str] = {}
        self._ranks: dict[tuple[str, str], Rank] = {}
        self._epochs: dict[tuple[str, str, int], int] = {}
        self._marks: dict[str, str] = {}
        self._deadline_s = 0.0
        #: Answers that the recording has had by now.
        self._pending: list[Item] = []
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
        self._deadline_s = began + self._options.limit_s
        needs = find_needs(merge(self._logs), self._options.only)
        for mark, attach in needs.attaches.items():
            self._marks[mark] = fingerprint(renamed(attach.namespace, self._word))
        try:
            self._entries(needs)
            for rank in self._ranks.values():
                rank.check_released()
            self._audit()
        finally:
            self._close()
        self._played.seconds = time.monotonic() - began
        return self._played

    # -- the recording -------------------------------------------------------------------------

    def _entries(self, needs: Needs) -> None:
        first_ns: int | None = None
        began = time.monotonic()
        for entry in merge(self._logs):
            if entry.log not in self._daemons:
                self._start(entry.log, needs)
                began = began if first_ns is not None else time.monotonic()
            first_ns = entry.at_ns if first_ns is None else first_ns
            offset_ns = entry.at_ns - first_ns
            if self._options.until_ns is not None and offset_ns > self._options.until_ns:
                break
            self._played.recorded_seconds = offset_ns / 1e9
            if isinstance(entry.event, (work.SchedulerSaid, work.ModelSaid, work.PeerLost)):
                self._wait_for_answers()
                if self._options.speed > 0:
                    self._wait_until(began + offset_ns / 1e9 / self._options.speed)
                self._say(entry, entry.event)
            for item, what in recorded(entry):
                if self._is_wanted(item):
                    self._played.tally.expected[item] = what
                    self._pending.append(item)
        self._wait_for_answers()

    def _say(
        self, entry: Entry, event: work.SchedulerSaid | work.ModelSaid | work.PeerLost
    ) -> None:
        rank = self._rank(entry.log, event.engine)
        self._played.num_said += 1
        if isinstance(event, work.PeerLost):
            rank.lose(event.role)
            return
        key = (event.engine, type(event).__name__, event.epoch)
        epoch = self._epochs.setdefault(key, new_epoch())
        body: msg.Message | None = event.body
        if isinstance(body, msg.Attach):
            rank.attach(body, epoch)
            self._wait(lambda: rank.attached is not None, f"{rank.name} is not attached")
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
                self._wait(lambda: rank.layers_ready(step, layers), what)
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

    # -- waiting -------------------------------------------------------------------------------

    def _wait_for_answers(self) -> None:
        found = self._played.tally.found
        for item in self._pending:
            if item not in found:
                self._wait(lambda: item in found, f"{item} has no answer")  # noqa: B023
                found.setdefault(item, "no answer")
        self._pending.clear()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Listen until something is so; note a fault if that takes too long."""
        deadline = time.monotonic() + self._options.answer_s
        while not done():
            self._check_time()
            if time.monotonic() > deadline:
                self._played.tally.fault(f"{what} after {self._options.answer_s:g} s")
                return
            self._listen(_LOOK_S)

    def _wait_until(self, moment_s: float) -> None:
        while (left := moment_s - time.monotonic()) > 0:
            self._listen(min(left, _LOOK_S))

    def _listen(self, timeout_s: float) -> None:
        self._check_time()
        nothing = True
        if sum(rank.watch() for rank in self._ranks.values()):
            timeout_s = min(timeout_s, _WATCH_S)
        for link, body in self._links.hear(timeout_s):
            nothing = False
            for (log, name), rank in self._ranks.items():
                if rank.owns(link):
                    rank.heard(body)
                    if link.channel.role == "scheduler":
                        for kind, number, what in describe(body):
                            self._played.tally.found[Item(kind, log, name, number)] = what
        if nothing:
            for daemon in self._daemons.values():
                daemon.check()

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise DriveError(f"the run takes longer than {self._options.limit_s:g} s (--limit)")

    # -- daemons and ranks ---------------------------------------------------------------------

    def _start(self, label: str, needs: Needs) -> None:
        """Start the daemon of a log; one that served the device before is ended."""
        log = next(one for one in self._logs if one.label == label)
        recorded_device = log.header.info.get("device", "cpu:0")
        number = recorded_device.rpartition(":")[2]
        device = f"cpu:{number if number.isdecimal() else 0}"
        for other, daemon in self._daemons.items():
            if self._devices[other] == device:
                for (owner, _), rank in self._ranks.items():
                    if owner == other:
                        rank.close()
                daemon.stop()
        if not log.begins_at_start:
            self._played.notes.append(f"{label} does not begin at its start")
        options = [*self._options.store, "--event-log", str(self._options.directory / "logs")]
        daemon = Daemon(self._options.directory, device, options, self._options.program)
        self._daemons[label], self._devices[label] = daemon, device
        daemon.__enter__()
        for mark, owner in needs.logs.items():
            if owner == label:
                self._seed(label, needs, mark)

    def _rank(self, label: str, name: str) -> Rank:
        key = (label, name)
        if key not in self._ranks:
            self._ranks[key] = Rank(name, self._setting(label))
        return self._ranks[key]

    def _setting(self, label: str) -> Setting:
        return Setting(
            links=self._links,
            seed=self._options.seed,
            word=self._word,
            device=self._devices[label],
            endpoint=self._daemons[label].endpoint,
            tally=self._played.tally,
        )

    # -- on our own account --------------------------------------------------------------------

    def _own_rank(self, label: str, attach: msg.Attach) -> Rank:
        """A rank that is not in the recording, attached, with the namespace of one that is."""
        rank = self._rank(label, f"kvreplay-{len(self._ranks)}#0")
        rank.attach(attach, new_epoch())
        self._wait(lambda: rank.attached is not None, f"{rank.name} is not attached")
        rank.hello(msg.Hello(pid=0, ranks=()), new_epoch(), {})
        return rank

    def _seed(self, label: str, needs: Needs, mark: str) -> None:
        """Store what the recording takes for granted."""
        objects = []
        for key in needs.of(mark):
            # A key that is none of ours is nothing that could be stored.
            with contextlib.suppress(ValueError):
                objects.append((key_group(key), bytes.fromhex(key_hash(key))))
        if not objects:
            return
        attach = needs.attaches[mark]
        rank = self._own_rank(label, attach)
        for step, (group, hashes) in enumerate(_batches(objects, attach), start=1):
            blocks = list(enumerate(hashes, start=1))
            plan = msg.StepPlan(step=step, saves=(save_job(step, group, blocks),))
            self._step(rank, label, step, plan)
            self._played.num_seeded += len(blocks)
        rank.close()

    def _audit(self) -> None:
        """Read back every object that is said to be stored, and compare."""
        tally = self._played.tally
        before = tally.num_checked
        for (label, _), recorded_rank in list(self._ranks.items()):
            attach = recorded_rank.last_attach
            if attach is None or not recorded_rank.stored or not self._daemons[label].pid:
                continue
            rank = self._own_rank(label, attach)
            batches = _batches(list(recorded_rank.stored), attach)
            for step, (group, hashes) in enumerate(batches, start=1):
                blocks = list(enumerate(hashes, start=1))
                plan = msg.StepPlan(step=step, loads=(load_job(step, group, blocks),))
                num_checked = tally.num_checked
                self._step(rank, label, step, plan)
                lost = len(blocks) - (tally.num_checked - num_checked)
                if lost:
                    self._lost(lost, tally.found.get(Item("job", label, rank.name, step), ""))
            rank.close()
        self._played.num_audited = tally.num_checked - before

    def _lost(self, num: int, what: str) -> None:
        """Objects that are said to be stored cannot be read back."""
        what = what or "no answer"
        text = f"{num} objects that are said to be stored cannot be read back: {what}"
        if all(daemon.pid for daemon in self._daemons.values()):
            self._played.tally.fault(text)
        else:
            # A daemon that was ended on the way has taken its memory with it.
            self._played.notes.append(text)

    def _step(self, rank: Rank, label: str, number: int, plan: msg.StepPlan) -> None:
        (job,) = plan_jobs(plan)
        rank.scheduler(plan)
        rank.model(msg.StepBegun(step=number))
        if plan.saves:
            rank.scheduler(msg.StepVerdict(step=number))
        item = Item("job", label, rank.name, job.job_id)
        found = self._played.tally.found
        self._wait(lambda: item in found, f"{item} has no answer")

    def _close(self) -> None:
        for rank in self._ranks.values():
            rank.close()
        for daemon in self._daemons.values():
            with contextlib.suppress(DriveError):
                daemon.stop()
        self._links.close()


def _batches(
    objects: Sequence[tuple[int, bytes]], attach: msg.Attach
) -> Iterator[tuple[int, list[bytes]]]:
    """Cut objects (group, hash) into steps: of one group, and no more than it has blocks."""
    for group in attach.layout.groups:
        mine = [block_hash for number, block_hash in objects if number == group.group]
        size = max(1, min(_BATCH, group.num_blocks - 1))
        for first in range(0, len(mine), size):
            yield group.group, mine[first : first + size]
