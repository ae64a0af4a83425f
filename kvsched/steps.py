"""vLLM's ``SchedulerOutput`` read as one ``StepScheduled``: only what the core must know.

Cost matters here: this runs in every step. While nothing is tracked it looks at no request, however
many of them decode.
"""

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from kvsched.core.events import ScheduledRequest, StepScheduled

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

#: Only one KV cache group is served (checked at start), so block id tuples have one entry.
_GROUP = 0


def scheduled_step(
    output: "SchedulerOutput",
    step: int,
    now_ns: int,
    *,
    active: Mapping[str, None],
    requests: Mapping[str, "Request"],
    told: MutableMapping[str, int],
) -> StepScheduled:
    """Read one step.

    Args:
        output: vLLM's ``SchedulerOutput`` (any version since 0.23).
        step: Our number of the step.
        now_ns: Monotonic time.
        active: Requests that the core still tracks; falsy if there are none.
        requests: vLLM's request objects by id.
        told: How many block hashes of each request the core knows; brought up to date here.

    Returns:
        The event; with neither requests nor preemptions there may be no need to tell the core.
    """
    preempted = getattr(output, "preempted_req_ids", None)
    num_tokens: Mapping[str, int] = output.num_scheduled_tokens
    scheduled = [
        ScheduledRequest(
            request_id=new.req_id,
            num_computed_tokens=new.num_computed_tokens,
            num_scheduled_tokens=num_tokens[new.req_id],
            # New, or (model runner V2) resumed after preemption: the list is complete.
            replace=True,
            block_ids=tuple(new.block_ids[_GROUP]),
            new_block_hashes=_new_hashes(new.req_id, requests, told),
        )
        for new in (output.scheduled_new_reqs if active else ())
        if new.req_id in active
    ]
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids if active else ()):
        if request_id in active:
            blocks = cached.new_block_ids[index]
            scheduled.append(
                ScheduledRequest(
                    request_id=request_id,
                    num_computed_tokens=cached.num_computed_tokens[index],
                    num_scheduled_tokens=num_tokens[request_id],
                    replace=request_id in cached.resumed_req_ids,
                    block_ids=tuple(blocks[_GROUP]) if blocks else (),
                    new_block_hashes=_new_hashes(request_id, requests, told),
                )
            )
    return StepScheduled(
        step=step,
        now_ns=now_ns,
        requests=tuple(scheduled),
        preempted=tuple(sorted(preempted)) if preempted else (),
    )


def _new_hashes(
    request_id: str, requests: Mapping[str, "Request"], told: MutableMapping[str, int]
) -> tuple[bytes, ...]:
    request = requests.get(request_id)
    if request is None:
        return ()
    hashes = request.block_hashes
    known = told.get(request_id, 0)
    if len(hashes) <= known:
        return ()
    told[request_id] = len(hashes)
    return tuple(hashes[known:])
