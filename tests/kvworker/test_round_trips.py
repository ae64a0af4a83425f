"""Round trips to the store's master: as many per step as sessions need, whatever the layers."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcommon.config import DaemonConfig
from kvcommon.messages import (
    JobOutcome,
    JobsEnded,
    LayersComputed,
    LoadJob,
    PlanAck,
    SaveJob,
    StepBegun,
    StepPlan,
    StepVerdict,
)
from kvworker import assembly
from kvworker.shell import Daemon
from kvworker.stores.memory import MemoryStore
from tests.support import fakemodel
from tests.support.client import Client
from tests.support.countingstore import CountingStore
from tests.support.engine import attach
from tests.support.fakedaemon import until
from tests.support.fakemodel import FakeModel

NUM_LAYERS = 8
HASHES = tuple(bytes([number]) * 32 for number in range(1, 7))
MASTER = ("put_start", "put_end", "put_revoke", "get_start", "get_end", "find")


class Engine:
    """Both sides of an engine, attached to a daemon whose store counts."""

    def __init__(self, endpoint: str, store: CountingStore, stack: contextlib.ExitStack) -> None:
        self.store = store
        self.model = FakeModel()
        stack.callback(self.model.close)
        self.control = stack.enter_context(Client(endpoint, "model"))
        epoch = self.control.channel.epoch
        self.data = stack.enter_context(Client(endpoint, "data", epoch=epoch))
        self.scheduler = stack.enter_context(Client(endpoint, "scheduler"))
        attach(self.control, self.scheduler, self.model)

    def counts(self, *last: str) -> dict[str, int]:
        """Calls that ask the master, since the last time, once those that end sessions are made.

        Jobs are reported before their sessions are closed.
        """
        self.called(*last)
        counted = self.store.counts()
        self.store.clear()
        return {name: counted[name] for name in MASTER if counted[name]}

    def called(self, *methods: str) -> None:
        """Wait until the store has been asked each of these."""
        pause = threading.Event()
        until(
            lambda: all(self.store.counts()[name] for name in methods),
            lambda timeout_ms: pause.wait(timeout_ms / 1e3),
        )

    def ends(self, number: int) -> dict[int, JobOutcome]:
        """The ends of that many jobs."""
        ended: dict[int, JobOutcome] = {}
        while len(ended) < number:
            ended |= {end.job_id: end.outcome for end in self.scheduler.hear(JobsEnded).ends}
        return ended

    def save(
        self, step: int, jobs: dict[int, tuple[int, ...]], tainted: tuple[int, ...] = ()
    ) -> dict[int, JobOutcome]:
        """One step with several requests' saves (job → numbers of its blocks), layer by layer."""
        saves = tuple(
            SaveJob(
                job_id=job,
                request_id=f"r{job}",
                group=0,
                block_ids=blocks,
                block_hashes=tuple(HASHES[block - 1] for block in blocks),
            )
            for job, blocks in jobs.items()
        )
        self.scheduler.say(StepPlan(step=step, saves=saves))
        self.scheduler.hear(PlanAck)
        self.data.say(StepBegun(step=step))
        for layer in range(NUM_LAYERS):
            self.data.say(LayersComputed(step=step, num_layers=layer + 1))
        # A verdict that overtook the opening would find nothing to revoke.
        self.called("put_start")
        self.scheduler.say(StepVerdict(step=step, tainted=tainted))
        return self.ends(len(jobs))

    def load(
        self, step: int, jobs: dict[int, tuple[int, ...]], *, layerwise: bool
    ) -> dict[int, JobOutcome]:
        """One step with several requests' loads."""
        loads = tuple(
            LoadJob(
                job_id=job,
                request_id=f"r{job}",
                group=0,
                block_ids=tuple(block + 6 for block in blocks),
                block_hashes=tuple(HASHES[block - 1] for block in blocks),
                layerwise=layerwise,
            )
            for job, blocks in jobs.items()
        )
        self.scheduler.say(StepPlan(step=step, loads=loads))
        self.scheduler.hear(PlanAck)
        self.data.say(StepBegun(step=step))
        return self.ends(len(jobs))


@pytest.fixture(params=["layerwise", "auto"])
def save(request: pytest.FixtureRequest) -> Any:
    """When saves are written: while the step computes, or (local memory) after its verdict."""
    return request.param


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, save: Any) -> Iterator[Engine]:
    """With eight layers, before a daemon in a thread."""
    monkeypatch.setattr(fakemodel, "NUM_LAYERS", NUM_LAYERS)
    size = NUM_LAYERS * 2 * fakemodel.NUM_BLOCKS * fakemodel.PLANE_BLOCK_BYTES
    monkeypatch.setattr(fakemodel, "_SIZE", size)
    store = CountingStore(MemoryStore(1 << 20))
    monkeypatch.setattr(assembly, "make_store", lambda *_: store)
    daemon = Daemon(
        DaemonConfig(
            device="cpu:0", store="memory", run_dir=str(tmp_path), save=save, validate=True
        )
    )
    daemon.start()
    thread = threading.Thread(target=daemon.serve)
    thread.start()
    try:
        with contextlib.ExitStack() as stack:
            made = Engine(daemon.endpoint, store, stack)
            assert len(made.model.layout.groups[0].layers) == NUM_LAYERS
            store.clear()
            yield made
    finally:
        daemon.stop()
        thread.join()
        assert daemon.close()


def test_a_step_of_saves_asks_the_master_twice(engine: Engine) -> None:
    written = [engine.model.fill(block, seed=block) for block in range(1, 6)]
    ended = engine.save(10, {1: (1, 2), 2: (3,), 3: (4, 5)})
    assert set(ended.values()) == {JobOutcome.DONE}
    assert engine.store.keys("put_start") == engine.store.keys("put_end")
    assert len(engine.store.keys("put_start")[0]) == 5
    assert engine.counts("put_end") == {"put_start": 1, "put_end": 1}
    assert len(set(written)) == 5


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_step_of_loads_asks_the_master_twice(engine: Engine, layerwise: bool) -> None:
    written = [engine.model.fill(block, seed=block) for block in range(1, 4)]
    engine.save(10, {1: (1, 2), 2: (3,)})
    engine.store.clear()
    ended = engine.load(11, {3: (1, 2), 4: (3,)}, layerwise=layerwise)
    assert set(ended.values()) == {JobOutcome.DONE}
    assert engine.counts("get_end") == {"get_start": 1, "get_end": 1}
    assert [engine.model.block(block + 6) for block in range(1, 4)] == written


def test_tainted_jobs_add_one_revocation(engine: Engine) -> None:
    ended = engine.save(10, {1: (1, 2), 2: (3,), 3: (4, 5)}, tainted=(2, 3))
    assert ended == {1: JobOutcome.DONE, 2: JobOutcome.CANCELLED, 3: JobOutcome.CANCELLED}
    expected = ("put_start", "put_end", "put_revoke")
    assert engine.counts(*expected) == dict.fromkeys(expected, 1)


def test_each_step_has_its_own(engine: Engine) -> None:
    engine.save(10, {1: (1,)})
    engine.save(11, {2: (2,)})
    assert engine.counts() == {"put_start": 2, "put_end": 2}


def test_what_is_stored_already_is_not_written_again(engine: Engine) -> None:
    engine.save(10, {1: (1, 2)})
    engine.store.clear()
    assert engine.save(11, {2: (1, 2)}) == {2: JobOutcome.SKIPPED}
    assert "put_end" not in engine.counts()
