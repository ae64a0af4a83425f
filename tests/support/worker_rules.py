"""What must hold of everything that the daemon's core says, whatever happened before.

- Each planned job ends exactly once while its scheduler side lives, and none of its blocks is
  touched by an operation in flight when it does.
- Nothing is published that was tainted, cancelled, incomplete or not judged.
- Nothing is read into a block before its step has begun, nothing written before it is computed.
- One put per key, balanced get references, and a page word for whoever waits for it.
"""

from collections import Counter
from typing import Any

from kvcommon.messages import (
    Attached,
    JobEnd,
    JobOutcome,
    JobsEnded,
    LoadJob,
    LookupResult,
    SaveJob,
    Welcome,
)
from kvworker.core.commands import (
    Cancel,
    CloseGets,
    ClosePuts,
    LoadLayers,
    OpenPuts,
    PublishProgress,
    SendToModel,
    SendToScheduler,
    UnmapEngine,
    WorkerCommand,
    WriteLayers,
)
from tests.support.playbook import NUM_LAYERS
from tests.support.worker_records import Planned, Rank


class Rules:
    """Records of what is going on outside of the core, and the checks of each command."""

    def __init__(self) -> None:
        self.ranks = {name: Rank(name) for name in ("a#0", "b#0")}
        #: Operations in flight.
        self.pending: dict[int, Any] = {}
        self.cancelled: set[int] = set()
        #: Open put sessions: key → layers written.
        self.puts: dict[str, int] = {}
        self.gets: Counter[str] = Counter()
        #: (rank, block id) → loaded whole.
        self.loaded: set[tuple[str, int]] = set()
        self.published: set[str] = set()

    def check(self, command: WorkerCommand) -> None:
        if isinstance(command, Cancel):
            assert command.op in self.pending, "what is not in flight is cancelled"
            self.cancelled.add(command.op)
        elif isinstance(command, SendToModel):
            self._check_to_model(self.ranks[command.engine], command.body)
        elif isinstance(command, SendToScheduler):
            self._check_to_scheduler(self.ranks[command.engine], command.body)
        elif isinstance(command, PublishProgress):
            rank = self.ranks[command.engine]
            assert rank.attached, "there is no page"
            rank.page[rank.incarnation, command.step] = command.failed
        else:
            self._check_work(command)
            self.pending[command.op] = command

    def _check_work(self, command: Any) -> None:
        if isinstance(command, OpenPuts):
            opening = {k for c in self.pending.values() if isinstance(c, OpenPuts) for k in c.keys}
            for name in command.keys:
                assert name not in self.puts, "two puts on one key"
                assert name not in opening, "two puts on one key"
            assert len(set(command.keys)) == len(command.keys)
        elif isinstance(command, WriteLayers):
            self._check_write(command)
        elif isinstance(command, ClosePuts):
            self._check_close(command)
        elif isinstance(command, LoadLayers):
            rank = self.ranks[command.engine]
            assert rank.attached, "loads into memory that is not mapped"
            gate = max(rank.begun, *rank.judged, 0)
            assert command.step <= gate, "loads before the gate"
            assert all(self.gets[name] > 0 for name in command.keys), "reads without a session"
        elif isinstance(command, CloseGets):
            for name in command.keys:
                assert self.gets[name] > 0, "a reference is given back twice"
                self.gets[name] -= 1
        elif isinstance(command, UnmapEngine):
            for op, other in self.pending.items():
                if isinstance(other, (WriteLayers, LoadLayers)) and other.engine == command.engine:
                    assert op in self.cancelled, "unmaps under what is not cancelled"

    def _job_of(self, rank: Rank, block_id: int) -> Planned:
        (planned,) = [p for p in rank.jobs.values() if block_id in p.job.block_ids]
        return planned

    def _check_write(self, command: WriteLayers) -> None:
        rank = self.ranks[command.engine]
        assert rank.attached, "reads memory that is not mapped"
        for name, block_id in zip(command.keys, command.block_ids, strict=True):
            planned = self._job_of(rank, block_id)
            assert (block_id, name) in planned.parts, "a block under another block's key"
            assert planned.end is None, "the job has ended"
            if command.whole:
                assert (command.first_layer, command.end_layer) == (0, NUM_LAYERS), "not whole"
                assert name not in self.puts, "a whole object over an open session"
                assert command.step in rank.judged, "publishes before the verdict"
                assert not planned.tainted, "publishes what is tainted"
            else:
                assert self.puts[name] == command.first_layer, "layers out of order"
            job = planned.job
            assert isinstance(job, SaveJob)
            ready = NUM_LAYERS if job.computed else rank.computed.get(command.step, 0)
            assert command.step <= rank.begun, "reads before the step has begun"
            assert command.end_layer <= ready, "reads what is not computed"

    def _check_close(self, command: ClosePuts) -> None:
        rank = self.ranks[command.engine]
        assert set(command.end) | set(command.revoke) <= set(self.puts), "closes what is not open"
        assert not set(command.end) & set(command.revoke)
        assert len(set(command.revoke)) == len(command.revoke)
        for name in command.end:
            assert self.puts[name] == NUM_LAYERS, "publishes what is incomplete"
            wanted = [
                planned
                for planned in rank.jobs.values()
                if planned.end is None and planned.step == command.step
                if any(name == each for _, each in planned.parts)
            ]
            assert wanted, "publishes what nobody wants"
            assert command.step in rank.judged, "publishes before the verdict"
            assert any(not planned.tainted for planned in wanted), "publishes what is tainted"

    def _check_to_model(self, rank: Rank, body: object) -> None:
        if isinstance(body, Attached):
            rank.attached = True
        elif isinstance(body, JobsEnded):
            for end in body.ends:
                planned = rank.jobs.get(end.job_id)
                if planned is None:
                    continue  # of a scheduler side that was replaced
                assert isinstance(planned.job, LoadJob)
                assert not planned.told_model, "the model side is told twice"
                planned.told_model = True

    def _check_to_scheduler(self, rank: Rank, body: object) -> None:
        if isinstance(body, Welcome):
            assert body.attached == rank.attached
        elif isinstance(body, LookupResult):
            rank.lookups.remove(body.lookup_id)
        elif isinstance(body, JobsEnded):
            for end in body.ends:
                self._check_end(rank, rank.jobs[end.job_id], end)

    def _check_end(self, rank: Rank, planned: Planned, end: JobEnd) -> None:
        assert planned.delivered, "an end before the plan"
        assert planned.end is None, "a job ended twice"
        planned.end = end
        mine = set(planned.job.block_ids)
        for other in self.pending.values():
            if isinstance(other, (WriteLayers, LoadLayers)) and other.engine == rank.name:
                assert not mine & set(other.block_ids), "ended while its blocks are touched"
        if planned.is_load and end.reason != "daemon-lost":
            bad = set(end.failed_blocks)
            for block_id in mine - bad:
                assert (rank.name, block_id) in self.loaded, "an end that promises too much"
            assert (end.outcome is JobOutcome.DONE) == (not bad)
        if end.outcome is JobOutcome.DONE and not planned.is_load:
            assert not planned.tainted
            assert any(name in self.published for _, name in planned.parts)

    def check_pages(self, rank: Rank) -> None:
        """Whoever waits for the layers of a step goes on, and knows if something failed."""
        for planned in rank.jobs.values():
            job, end = planned.job, planned.end
            if not isinstance(job, LoadJob) or not job.layerwise or end is None:
                continue
            if not planned.incarnation or planned.incarnation != rank.incarnation:
                continue
            if not rank.attached:
                continue
            failed = rank.page.get((rank.incarnation, planned.step))
            assert failed is not None, "the page never turns"
            assert failed or not end.failed_blocks, "the page hides a failure"
