"""What the world around the daemon's core remembers: ranks, planned jobs, and their making."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Union

from kvcommon.messages import JobEnd, LoadJob, Message, SaveJob
from tests.support.playbook import block_hash, key


@dataclass
class Planned:
    """A job as its scheduler side knows it."""

    job: Union[LoadJob, SaveJob]
    step: int
    epoch: int
    #: The plan reached the daemon while this incarnation (0: none) of the model was attached.
    incarnation: int = 0
    delivered: bool = False
    end: JobEnd | None = None
    told_model: bool = False
    tainted: bool = False

    @property
    def is_load(self) -> bool:
        return isinstance(self.job, LoadJob)

    @property
    def parts(self) -> list[tuple[int, str]]:
        """(block id, key)."""
        hashes = self.job.block_hashes
        return [
            (block_id, key(int.from_bytes(each, "big")))
            for block_id, each in zip(self.job.block_ids, hashes, strict=True)
        ]


@dataclass(repr=False)
class Rank:
    """One rank of one engine: its two sides and what they have not delivered yet."""

    name: str
    model_epoch: int = 0
    attached: bool = False
    incarnation: int = 0
    epoch: int = 0
    #: Newest step scheduled, begun by the model process, and whose output came back.
    scheduled: int = 0
    running: int = 0
    finished: int = 0
    from_model: "deque[Message]" = field(default_factory=deque)
    from_scheduler: "deque[Message]" = field(default_factory=deque)
    #: As delivered to the daemon.
    begun: int = 0
    computed: dict[int, int] = field(default_factory=dict)
    judged: set[int] = field(default_factory=set)
    jobs: dict[int, Planned] = field(default_factory=dict)
    lookups: set[int] = field(default_factory=set)
    #: (incarnation, step) → the page's last word: did anything fail?
    page: dict[tuple[int, int], bool] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name

    def open_jobs(self) -> list[Planned]:
        return [planned for planned in self.jobs.values() if planned.end is None]


def make_load(
    job_id: int, block_ids: Sequence[int], hashes: Sequence[int], layerwise: bool
) -> LoadJob:
    return LoadJob(
        job_id=job_id,
        request_id=f"r{job_id}",
        group=0,
        block_ids=tuple(block_ids),
        block_hashes=tuple(map(block_hash, hashes)),
        layerwise=layerwise,
    )


def make_save(
    job_id: int, block_ids: Sequence[int], hashes: Sequence[int], computed: bool
) -> SaveJob:
    return SaveJob(
        job_id=job_id,
        request_id=f"r{job_id}",
        group=0,
        block_ids=tuple(block_ids),
        block_hashes=tuple(map(block_hash, hashes)),
        computed=computed,
    )
