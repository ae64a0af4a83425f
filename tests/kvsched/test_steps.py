"""vLLM's ``SchedulerOutput``, read as one event."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from kvsched.core.events import ScheduledRequest, StepScheduled
from kvsched.steps import scheduled_step

STEP, NOW_NS = 7, 123


def new(req_id: str, blocks: list[int], computed: int = 0) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=[1, 2],
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=(blocks,),
        num_computed_tokens=computed,
        lora_request=None,
    )


def cached(
    ids: list[str],
    blocks: list[tuple[list[int], ...] | None],
    computed: list[int],
    resumed: tuple[str, ...] = (),
) -> CachedRequestData:
    empty = CachedRequestData.make_empty()
    empty.req_ids = ids
    empty.resumed_req_ids = set(resumed)
    empty.new_block_ids = blocks
    empty.num_computed_tokens = computed
    empty.num_output_tokens = [0] * len(ids)
    return empty


def output(
    scheduled: dict[str, int],
    *,
    fresh: tuple[NewRequestData, ...] = (),
    running: CachedRequestData | None = None,
    preempted: set[str] | None = None,
) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    made.scheduled_new_reqs = list(fresh)
    made.scheduled_cached_reqs = running or CachedRequestData.make_empty()
    made.num_scheduled_tokens = scheduled
    made.total_num_scheduled_tokens = sum(scheduled.values())
    made.preempted_req_ids = preempted
    return made


def request(*hashes: bytes) -> Any:
    return SimpleNamespace(block_hashes=list(hashes))


def read(
    step: SchedulerOutput,
    *,
    active: tuple[str, ...],
    requests: dict[str, Any] | None = None,
    told: dict[str, int] | None = None,
) -> StepScheduled:
    return scheduled_step(
        step,
        STEP,
        NOW_NS,
        active=dict.fromkeys(active),
        requests=requests or {},
        told={} if told is None else told,
    )


def test_a_new_request_brings_its_whole_list() -> None:
    step = output({"a": 30}, fresh=(new("a", [4, 5], computed=16),))
    event = read(step, active=("a",))
    assert event == StepScheduled(
        step=STEP,
        now_ns=NOW_NS,
        requests=(
            ScheduledRequest(
                request_id="a",
                num_computed_tokens=16,
                num_scheduled_tokens=30,
                replace=True,
                block_ids=(4, 5),
            ),
        ),
    )


def test_running_requests_bring_what_is_new() -> None:
    running = cached(["a", "b", "c"], [([9],), None, ([1, 2],)], [32, 48, 0], resumed=("c",))
    event = read(output({"a": 1, "b": 2, "c": 3}, running=running), active=("a", "b", "c"))
    assert [
        (each.request_id, each.num_computed_tokens, each.num_scheduled_tokens)
        for each in event.requests
    ] == [("a", 32, 1), ("b", 48, 2), ("c", 0, 3)]
    assert [each.block_ids for each in event.requests] == [(9,), (), (1, 2)]
    # Resumed after preemption: the list is the whole list.
    assert [each.replace for each in event.requests] == [False, False, True]


def test_requests_that_the_core_does_not_track_are_left_out() -> None:
    running = cached(["b", "c"], [None, None], [1, 1])
    step = output({"a": 9, "b": 1, "c": 1}, fresh=(new("a", [1]),), running=running)
    assert [each.request_id for each in read(step, active=("c",)).requests] == ["c"]
    assert read(step, active=("a",)).requests[0].request_id == "a"
    assert read(step, active=()).requests == ()


def test_preempted_requests_are_told_even_if_nothing_is_tracked() -> None:
    step = output({}, preempted={"z", "b"})
    assert read(step, active=()).preempted == ("b", "z")
    assert read(output({}), active=()).preempted == ()


def test_an_output_without_the_field_has_no_preemptions() -> None:
    step = output({})
    older: Any = SimpleNamespace(
        scheduled_new_reqs=step.scheduled_new_reqs,
        scheduled_cached_reqs=step.scheduled_cached_reqs,
        num_scheduled_tokens={},
    )
    assert read(older, active=("a",)).preempted == ()


def test_new_hashes_are_told_once() -> None:
    grown = request(b"1", b"2", b"3")
    told = {"a": 1}
    step = output({"a": 1}, running=cached(["a"], [None], [5]))
    first = read(step, active=("a",), requests={"a": grown}, told=told)
    assert first.requests[0].new_block_hashes == (b"2", b"3")
    assert told == {"a": 3}
    again = read(step, active=("a",), requests={"a": grown}, told=told)
    assert again.requests[0].new_block_hashes == ()
    grown.block_hashes.append(b"4")
    third = read(step, active=("a",), requests={"a": grown}, told=told)
    assert third.requests[0].new_block_hashes == (b"4",)


def test_hashes_of_untracked_requests_stay_untold() -> None:
    told = {"a": 0, "b": 0}
    step = output({"a": 1, "b": 1}, fresh=(new("a", [1]), new("b", [2])))
    requests = {"a": request(b"1"), "b": request(b"2")}
    read(step, active=("b",), requests=requests, told=told)
    assert told == {"a": 0, "b": 1}
