"""Both sides of an engine in a test: what they say to a daemon, in the usual order."""

import os

from kvcommon.messages import (
    Attached,
    Hello,
    JobsEnded,
    LayersComputed,
    Lookup,
    LookupGroup,
    LookupResult,
    PlanAck,
    RankIdentity,
    SaveJob,
    StepBegun,
    StepPlan,
    StepVerdict,
    Welcome,
)
from tests.support.client import Client
from tests.support.fakemodel import FINGERPRINT, NUM_LAYERS, FakeModel

HASHES = (b"\x01" * 32, b"\x02" * 32)


def hello(open_jobs: tuple[int, ...] = ()) -> Hello:
    ranks = (RankIdentity(rank=0, fingerprint=FINGERPRINT),)
    return Hello(pid=os.getpid(), ranks=ranks, open_jobs=open_jobs)


def lookup(scheduler: Client, number: int) -> int:
    """How many of the two blocks are stored."""
    groups = (LookupGroup(group=0, block_hashes=HASHES),)
    scheduler.say(Lookup(lookup_id=number, request_id=f"r{number}", groups=groups))
    result = scheduler.hear(LookupResult)
    assert result.lookup_id == number
    return result.hits[0].num_blocks if result.hits else 0


def attach(control: Client, scheduler: Client, model: FakeModel) -> None:
    """Both sides say who they are; the daemon maps the memory."""
    scheduler.say(hello())
    assert not scheduler.hear(Welcome).attached
    control.say(model.attach())
    control.hear(Attached)
    assert scheduler.hear(Welcome).attached


def save(scheduler: Client, data: Client, step: int, blocks: tuple[int, int]) -> JobsEnded:
    """Save two blocks in one step, layer by layer."""
    job = SaveJob(job_id=step, request_id="r", group=0, block_ids=blocks, block_hashes=HASHES)
    scheduler.say(StepPlan(step=step, saves=(job,)))
    scheduler.hear(PlanAck)
    data.say(StepBegun(step=step))
    for layer in range(NUM_LAYERS):
        data.say(LayersComputed(step=step, num_layers=layer + 1))
    scheduler.say(StepVerdict(step=step))
    return scheduler.hear(JobsEnded)
