import logging
import os
import queue
import threading

import pytest

from kvworker.core.commands import ProbeStore
from kvworker.transfer.job import Job
from kvworker.transfer.lane import Lane


def job(op: int) -> Job:
    return Job(ProbeStore(op=op), None)


def test_jobs_are_done_in_order_by_one_prepared_thread() -> None:
    done: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def prepare() -> None:
        done.put((threading.current_thread().name, 0))

    def perform(one: Job) -> None:
        done.put((threading.current_thread().name, one.command.op))

    lane = Lane("load", prepare, perform, lambda one, why: None)
    for op in range(1, 6):
        lane.put(job(op))
    lane.finish()
    assert lane.join(20)
    assert [done.get() for _ in range(6)] == [("kvw-load", op) for op in range(6)]


def test_a_job_that_raises_is_answered_and_the_next_one_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[int] = []
    failed: list[tuple[int, str]] = []

    def perform(one: Job) -> None:
        if one.command.op == 1:
            raise RuntimeError("broken")
        done.append(one.command.op)

    lane = Lane(
        "find", lambda: None, perform, lambda one, why: failed.append((one.command.op, why))
    )
    lane.put(job(1))
    lane.put(job(2))
    lane.finish()
    assert lane.join(20)
    assert failed == [(1, "RuntimeError: broken")]
    assert done == [2]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert caplog.records[0].exc_info


def test_preparing_is_tried_again_for_each_job() -> None:
    tries: list[int] = []
    failed: list[int] = []
    done: list[int] = []

    def prepare() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("no device context")

    lane = Lane(
        "map",
        prepare,
        lambda one: done.append(one.command.op),
        lambda one, why: failed.append(one.command.op),
    )
    for op in (1, 2, 3):
        lane.put(job(op))
    lane.finish()
    assert lane.join(20)
    # The first try was before any job.
    assert failed == [1]
    assert done == [2, 3]


def test_only_the_lanes_own_thread_becomes_nicer() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen: list[int] = []

    def prepare() -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    for nice in (3, 100, 0):
        lane = Lane("save", prepare, lambda one: None, lambda one, why: None, nice)
        lane.finish()
        assert lane.join(20)
    assert seen == [min(before + 3, 19), 19, before]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_stuck_lane_can_be_drained() -> None:
    begun, resume = threading.Event(), threading.Event()
    done: list[int] = []

    def perform(one: Job) -> None:
        begun.set()
        assert resume.wait(20)
        done.append(one.command.op)

    lane = Lane("load", lambda: None, perform, lambda one, why: None)
    for op in (1, 2, 3):
        lane.put(job(op))
    assert begun.wait(20)
    assert lane.backlog == 2
    lane.finish()
    assert not lane.join(0)
    assert [one.command.op for one in lane.drain()] == [2, 3]
    resume.set()
    assert lane.join(20)
    assert done == [1]
