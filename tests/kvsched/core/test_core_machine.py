"""The core against a small vLLM and small daemons, in any order of events."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsched.core.events import Ticked
from tests.support.schedsim import Sim

RANK = st.integers(0, 1)


class CoreMachine(RuleBasedStateMachine):
    """Rules are what may happen next; the simulation checks what must hold."""

    sim: Sim
    #: How many more times something rare may happen.
    rare: int

    @initialize(
        engine=st.fixed_dictionaries(
            {
                "ranks": st.integers(1, 2),
                "depth": st.integers(1, 2),
                "policy": st.sampled_from(["recompute", "fail"]),
                "load": st.sampled_from(["auto", "layerwise", "async"]),
                "save_decode": st.booleans(),
                "held": st.sampled_from([3, 100]),
            }
        ),
        rare=st.sampled_from([0, 0, 3]),
        stored=st.integers(0, 8),
    )
    def start(self, engine: dict[str, Any], rare: int, stored: int) -> None:
        self.rare = rare
        self.sim = Sim(**engine)
        self.sim.seed("A", stored)

    @precondition(lambda self: len(self.sim.requests) < 6)
    @rule(
        many=st.lists(
            st.tuples(st.sampled_from("AAB"), st.integers(1, 32), st.integers(1, 8)),
            min_size=1,
            max_size=4,
        )
    )
    def add(self, many: list[tuple[str, int, int]]) -> None:
        for text, length, num_new in many:
            self.sim.add(text, length, num_new)

    @precondition(lambda self: len(self.sim.steps) < self.sim.depth)
    @rule(shrink=st.booleans())
    def schedule(self, shrink: bool) -> None:
        self.sim.schedule(shrink=shrink)

    @precondition(lambda self: any(not step.executed for step in self.sim.steps))
    @rule(fail=st.sampled_from([None, None, 0, 1]), early=st.booleans())
    def execute(self, fail: int | None, early: bool) -> None:
        self.sim.execute(fail_rank=fail, early=early)

    @precondition(lambda self: self.sim.steps and self.sim.steps[0].executed)
    @rule()
    def finish_step(self) -> None:
        self.sim.finish_step()

    @precondition(lambda self: self.sim.requests)
    @rule(
        count=st.integers(1, 6),
        shrink=st.booleans(),
        staged=st.booleans(),
        fail=st.sampled_from([None, None, None, 0, 1]),
        reports=st.booleans(),
    )
    def some_steps(
        self, count: int, shrink: bool, staged: bool, fail: int | None, reports: bool
    ) -> None:
        """Several steps in a row, so that requests get somewhere."""
        sim = self.sim
        for _ in range(count):
            while sim.lookups:
                sim.answer_lookup(0, staged=staged)
            while len(sim.steps) < sim.depth:
                sim.schedule(shrink=shrink)
            if not sim.steps[0].executed:
                sim.execute(fail_rank=fail, early=reports)
            if reports:
                self.run_load(0, fail is not None)
                self.run_load(1, fail is not None)
                self.deliver(0)
                self.deliver(1)
            sim.finish_step()

    @precondition(lambda self: self.sim.lookups)
    @rule(index=st.integers(0, 5), staged=st.booleans())
    def answer_lookup(self, index: int, staged: bool) -> None:
        self.sim.answer_lookup(index % len(self.sim.lookups), staged=staged)

    @rule(rank=RANK)
    def deliver(self, rank: int) -> None:
        self.sim.deliver(rank % len(self.sim.daemons))

    @precondition(lambda self: self.sim.model_loads)
    @rule(rank=RANK, fail=st.booleans())
    def run_load(self, rank: int, fail: bool) -> None:
        rank %= len(self.sim.daemons)
        for job_id in list(self.sim.model_loads):
            if job_id in self.sim.daemons[rank].loads:
                self.sim.run_load(rank, job_id, fail=fail)
        self.sim.lose_model_loads(rank)

    @precondition(lambda self: any(r.status != "aborted" for r in self.sim.requests.values()))
    @rule(index=st.integers(0, 5))
    def abort(self, index: int) -> None:
        alive = [r for r in self.sim.requests.values() if r.status != "aborted"]
        self.sim.finish(alive[index % len(alive)])

    @precondition(lambda self: self.sim.running)
    @rule()
    def preempt(self) -> None:
        self.sim.preempt(self.sim.running[-1])

    @precondition(lambda self: any(d.store for d in self.sim.daemons))
    @rule(rank=RANK, index=st.integers(0, 20))
    def evict(self, rank: int, index: int) -> None:
        store = self.sim.daemons[rank % len(self.sim.daemons)].store
        if store:
            del store[list(store)[index % len(store)]]

    @precondition(lambda self: self.rare > 0)
    @rule(rank=RANK, notice=st.booleans())
    def restart(self, rank: int, notice: bool) -> None:
        self.rare -= 1
        self.sim.restart(rank % len(self.sim.daemons), notice=notice)

    @precondition(lambda self: self.rare > 0)
    @rule(rank=RANK)
    def freeze(self, rank: int) -> None:
        rank %= len(self.sim.daemons)
        if self.sim.daemons[rank].reachable:
            self.rare -= 1
            self.sim.freeze(rank)

    @precondition(lambda self: any(not d.reachable for d in self.sim.daemons))
    @rule()
    def thaw(self) -> None:
        self.sim.thaw(next(d.rank for d in self.sim.daemons if not d.reachable))

    @rule(ms=st.sampled_from([1, 150, 3000, 6000]))
    def tick(self, ms: int) -> None:
        self.sim.play.later(ms)
        self.sim.play.say(Ticked(now_ns=self.sim.play.now_ns))

    @precondition(lambda self: self.rare > 0)
    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        self.rare -= 1
        self.sim.reset(running=running)

    @invariant()
    def no_free_block_is_in_an_open_job(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain()
            self.sim.play.replay()


CoreMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCoreMachine = pytest.mark.timeout(120)(CoreMachine.TestCase)
