"""What an engine's processes measure of themselves: the connector's hooks, and what was scheduled.

``install`` runs in every process of an engine, before any load; ``taken`` fetches and forgets.
Times are CLOCK_MONOTONIC, which all processes of a machine share.
"""

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

#: Everything that vLLM calls while it serves.
HOOKS = (
    "bind_connector_metadata",
    "build_connector_meta",
    "build_connector_worker_meta",
    "clear_connector_metadata",
    "get_block_ids_with_load_errors",
    "get_finished",
    "get_kv_connector_stats",
    "get_num_new_matched_tokens",
    "has_pending_push_work",
    "on_new_request",
    "request_finished_all_groups",
    "reset_cache",
    "save_kv_layer",
    "start_load_kv",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_layer_load",
    "wait_for_save",
)
#: Shorter spans are of no interest, unless they are the longest.
LONG_S = 0.1

#: What happened, when it began and ended, and for how much of that its thread could run but got no
#: processor.
Span = tuple[str, float, float, float]
_NONE: Span = ("", 0.0, 0.0, 0.0)


class Spans:
    """The longest span, and all that are long."""

    def __init__(self) -> None:
        self.kept: list[Span] = [_NONE]

    def add(self, name: str, began: tuple[float, float]) -> None:
        """Note a span that ends now; ``began`` is what ``now`` said."""
        ended, starved = now()
        span = (name, began[0], ended, starved - began[1])
        if ended - began[0] > LONG_S:
            self.kept.append(span)
        elif ended - began[0] > self.kept[0][2] - self.kept[0][1]:
            self.kept[0] = span

    def take(self) -> list[Span]:
        """Return what was kept, and forget it."""
        kept, self.kept = self.kept, [_NONE]
        return kept


_thread = threading.local()


def now() -> tuple[float, float]:
    """The time, and how long this thread has been without a processor so far."""
    try:
        fd: int = _thread.fd
    except AttributeError:
        fd = _thread.fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    return time.monotonic(), int(os.pread(fd, 64, 0).split()[1]) / 1e9


_hooks = Spans()
_counts = {"preempted": 0, "chunked": 0}
_installed: list[bool] = []


def install(_worker: object = None) -> None:
    """Measure from now on. Idempotent."""
    if _installed:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvsched.connector import KVFerryConnector

    _installed.append(True)
    for name in HOOKS:
        setattr(KVFerryConnector, name, _timed(name, getattr(KVFerryConnector, name)))
    preempt, schedule = Scheduler._preempt_request, Scheduler.schedule

    def counting_preempt(self: Any, *args: Any, **options: Any) -> Any:
        _counts["preempted"] += 1
        return preempt(self, *args, **options)

    def counting_schedule(self: Any, *args: Any, **options: Any) -> Any:
        output = schedule(self, *args, **options)
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            _counts["chunked"] += request.num_computed_tokens < request.num_prompt_tokens
        return output

    Scheduler._preempt_request = counting_preempt
    Scheduler.schedule = counting_schedule


def taken(_worker: object = None) -> dict[str, Any]:
    """Return this process's spans and counts since the last call."""
    counts = dict(_counts)
    _counts.update(dict.fromkeys(_counts, 0))
    return {"hooks": _hooks.take(), **counts}


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def timed(*args: Any, **options: Any) -> Any:
        began = now()
        try:
            return hook(*args, **options)
        finally:
            _hooks.add(name, began)

    return timed


def longest(spans: list[Span], frozen: tuple[float, float] | None = None) -> Span:
    """The longest span, without the time in which its process was stopped: (name, 0, length, …)."""
    best = _NONE
    for name, started, ended, starved in spans:
        length = ended - started
        if frozen is not None:
            length -= max(0.0, min(ended, frozen[1]) - max(started, frozen[0]))
        if length > best[2]:
            best = (name, 0.0, length, starved)
    return best


def longest_run(spans: list[Span], frozen: tuple[float, float] | None = None) -> Span:
    """As ``longest``, not counting what others used the processor for."""
    return longest([(name, began, ended - out, out) for name, began, ended, out in spans], frozen)
