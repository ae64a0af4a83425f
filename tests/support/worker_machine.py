"""Legal orders of events for the daemon's core, drawn by Hypothesis.

The checks are those of ``worker_rules``; here is only what may happen when. One rule draws among
whatever is possible now, by weight: a rule of its own for each would mostly draw impossible ones.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvcommon.messages import (
    CancelJobs,
    Detach,
    LoadJob,
    Lookup,
    LookupGroup,
    ReleaseLookup,
    ResetStore,
    SaveJob,
    StoreState,
)
from kvworker.core.commands import (
    ClosePuts,
    FindKeys,
    MapEngine,
    OpenGets,
    OpenPuts,
    ProbeStore,
    WriteLayers,
)
from kvworker.core.core import WorkerCore
from kvworker.outcome import Outcome
from tests.support.playbook import block_hash
from tests.support.worker_records import Rank, make_load, make_save
from tests.support.worker_world import World

_HASHES = st.lists(st.integers(1, 6), max_size=4)
_JOB = st.tuples(st.sampled_from(["load", "save"]), _HASHES, st.booleans())
_JOBS = st.lists(_JOB, min_size=1, max_size=4)
_GET = [Outcome.OK, Outcome.OK, Outcome.OK, Outcome.MISS, Outcome.FAILED, Outcome.DOWN]
_PUT = [Outcome.OK, Outcome.OK, Outcome.OK, Outcome.EXISTS, Outcome.FULL, Outcome.DOWN]
_MOVE = [Outcome.OK, Outcome.OK, Outcome.OK, Outcome.FAILED, Outcome.DOWN]
#: More than a command of this machine has keys.
_MAX_KEYS = 17


class CoreMachine(RuleBasedStateMachine):
    """Two ranks of one namespace on one daemon."""

    #: Replaced by mutants.
    core_type: type[WorkerCore] = WorkerCore
    #: The core checks itself after each event.
    validate = True

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.core_type, validate=self.validate)
        self._data: Any = None

    def _draw(self, strategy: Any) -> Any:
        return self._data.draw(strategy)

    @initialize()
    def start(self) -> None:
        """One rank is served from the beginning, so that most stories are about work."""
        rank = self.world.ranks["a#0"]
        self.world.attach(rank)
        self.world.hello(rank, again=False)
        self.world.answer(next(iter(self.world.pending)), ())

    @rule(data=st.data(), disturbed=st.integers(0, 11))
    def something_happens(self, data: st.DataObject, disturbed: int) -> None:
        """Whatever is possible; sides come and go rarely, or nothing would ever get done."""
        self._data = data
        possible: list[tuple[Callable[[Rank], None], Rank]] = []
        # Not 0: Hypothesis draws that more often than the others.
        choices = self._disturbances if disturbed == 5 else self._work
        for rank in self.world.ranks.values():
            weight = 3 if rank.name == "a#0" else 1
            for happens, times in choices(rank):
                possible += [(happens, rank)] * (times * weight)
        happens, rank = possible[data.draw(st.integers(0, len(possible) - 1))]
        note(f"{happens.__name__} {rank}")
        happens(rank)

    def _work(self, rank: Rank) -> list[tuple[Callable[[Rank], None], int]]:
        happens: list[tuple[Callable[[Rank], None], int]] = [(self._time_passes, 1)]
        mine = [op for op, command in self.world.pending.items() if _engine(command) == rank.name]
        happens.append((self._operation_ends, min(8, 4 * len(mine))))
        if rank.from_model:
            happens.append((self.world.deliver_model, 6))
        if rank.from_scheduler:
            happens.append((self.world.deliver_scheduler, 4))
        if not rank.model_epoch:
            happens.append((self.world.attach, 3))
        if not rank.epoch:
            happens.append((self._hello, 3))
        else:
            happens.append((self._step_is_scheduled, 3 if rank.attached else 1))
            happens.append((self._prefix_is_looked_up, 1))
        if rank.attached and rank.running < rank.scheduled:
            happens.append((self._step_runs, 4))
        if rank.epoch and rank.finished < rank.running:
            happens.append((self._step_comes_back, 3))
        if rank.attached and rank.open_jobs():
            happens.append((self._jobs_are_cancelled, 1))
        return happens

    def _disturbances(self, rank: Rank) -> list[tuple[Callable[[Rank], None], int]]:
        happens: list[tuple[Callable[[Rank], None], int]] = [
            (self.world.attach, 1),
            (self._hello, 2),
        ]
        if rank.model_epoch:
            happens.append((self._model_goes, 2))
        if rank.epoch:
            happens.append((self._store_is_reset, 1))
        return happens

    # --- sides come and go

    def _model_goes(self, rank: Rank) -> None:
        if self._draw(st.booleans()):
            self.world.lose_model(rank)
        else:
            rank.from_model.clear()
            rank.from_model.append(Detach())
            rank.attached = False
            self.world.deliver_model(rank)
            rank.model_epoch = 0

    def _hello(self, rank: Rank) -> None:
        again = bool(rank.epoch) and self._draw(st.booleans())
        if rank.epoch and self._draw(st.booleans()):
            rank.from_scheduler.clear()
            self.world.lose_scheduler(rank)
            if rank.from_model and again:
                self.world.deliver_model(rank)
        self.world.hello(rank, again=again)

    # --- work

    def _step_is_scheduled(self, rank: Rank) -> None:
        number = self.world.number
        jobs: list[LoadJob | SaveJob] = []
        for kind, hashes, flag in self._draw(_JOBS):
            block_ids = [number() for _ in hashes]
            make: Any = make_load if kind == "load" else make_save
            jobs.append(make(number(), block_ids, hashes, flag))
        self.world.schedule(rank, jobs)

    def _step_runs(self, rank: Rank) -> None:
        self.world.run_step(rank, self._draw(st.sampled_from([3, 3, 3, 2, 1, 0])))

    def _step_comes_back(self, rank: Rank) -> None:
        saves = [
            planned.job.job_id
            for planned in rank.jobs.values()
            if planned.step == rank.finished + 1 and not planned.is_load
        ]
        tainted = [job_id for job_id in saves if self._draw(st.integers(0, 2)) == 0]
        self.world.finish_step(rank, tainted)

    def _jobs_are_cancelled(self, rank: Rank) -> None:
        job_ids = [planned.job.job_id for planned in rank.open_jobs()]
        chosen = self._draw(st.lists(st.sampled_from(job_ids), unique=True, max_size=2))
        rank.from_model.append(CancelJobs(job_ids=tuple(chosen)))

    def _prefix_is_looked_up(self, rank: Rank) -> None:
        lookup_id = self.world.number()
        groups = (LookupGroup(group=0, block_hashes=tuple(map(block_hash, self._draw(_HASHES)))),)
        rank.from_scheduler.append(Lookup(lookup_id=lookup_id, request_id="r", groups=groups))
        if self._draw(st.booleans()):
            rank.from_scheduler.append(ReleaseLookup(lookup_id=lookup_id))

    def _store_is_reset(self, rank: Rank) -> None:
        rank.from_scheduler.append(ResetStore())

    def _time_passes(self, _rank: Rank) -> None:
        self.world.tick(self._draw(st.sampled_from([0, 10, 100, 2000])))

    # --- operations end, in any order

    def _operation_ends(self, rank: Rank) -> None:
        pending = self.world.pending.items()
        op = self._draw(st.sampled_from([op for op, c in pending if _engine(c) == rank.name]))
        command = self.world.pending[op]
        fields: dict[str, Any] = {}
        words = _MOVE
        if isinstance(command, MapEngine):
            fields["error"] = self._draw(st.sampled_from(["", "", "", "no"]))
        elif isinstance(command, ProbeStore):
            fields["state"] = self._draw(st.sampled_from(StoreState))
        elif isinstance(command, (FindKeys, OpenGets)):
            words = _GET
        elif isinstance(command, (OpenPuts, ClosePuts)):
            words = _PUT
            if isinstance(command, OpenPuts):
                fields["whole"] = self._draw(st.booleans())
        elif isinstance(command, WriteLayers):
            fields["short"] = self._draw(st.sampled_from([0, 0, 0, 0, 1]))
        if op in self.world.cancelled:
            words = [*words, *(Outcome.CANCELLED,) * 3]
        # Mostly all is well; where it is not, many keys may fail at once.
        if self._draw(st.booleans()):
            words = [Outcome.OK]
        outcomes = self._draw(
            st.lists(st.sampled_from(words), min_size=_MAX_KEYS, max_size=_MAX_KEYS)
        )
        self.world.answer(op, outcomes, **fields)

    def teardown(self) -> None:
        """Nothing is left over, and a fresh core gives the same answers to the same events."""
        self.world.settle()
        core = self.core_type(self.world.config)
        for event, commands in self.world.log:
            again = core.handle(event)
            assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(commands)


def _engine(command: Any) -> str:
    """Whose operation it is; probes and resets are nobody's."""
    return getattr(command, "engine", "a#0")
