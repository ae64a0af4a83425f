"""What the small vLLM of the scheduler core's simulation is made of: requests, steps, blocks."""

import dataclasses
from collections.abc import Iterable

from kvsched.core.commands import TellModel
from tests.support.schedplay import hashes

SIZE = 4
POOL = 18
CHUNK = 9
BUDGET = 16
MAX_TOKENS = 40

#: What a block holds: per token text, position and era, or None for a wrong value. Text and
#: position say it all, because a right value depends on all positions before it. The era is that
#: of the oldest value it was made from; a reset begins a new one, as new weights would.
Slots = list[tuple[str, int, int] | None]


def right(text: str, index: int, era: int) -> Slots:
    """What block ``index`` of a text holds when all is well."""
    return [(text, position, era) for position in range(index * SIZE, (index + 1) * SIZE)]


@dataclasses.dataclass
class Request:
    """VLLM's request."""

    name: str
    text: str
    num_prompt: int
    num_tokens: int
    max_tokens: int
    status: str = "waiting"
    computed: int = 0
    placeholders: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    #: Outputs of steps planned before this changed are thrown away.
    generation: int = 0
    told_hashes: int = 0
    load_failed: bool = False
    recved: bool = False

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return hashes(self.num_tokens // SIZE, self.text)


@dataclasses.dataclass
class Part:
    """One request of a step."""

    request: Request
    blocks: list[int]
    start: int
    count: int
    samples: bool
    generation: int


@dataclasses.dataclass
class Step:
    """A step in flight."""

    number: int
    parts: list[Part]
    tell: TellModel | None
    executed: bool = False
    invalid: set[int] = dataclasses.field(default_factory=set)
    #: Blocks that become free when it is finished.
    frees: list[int] = dataclasses.field(default_factory=list)


class Pool:
    """Block pool and prefix cache."""

    def __init__(self) -> None:
        self.refs = [0] * POOL
        self.refs[0] = 1
        self.free = list(range(1, POOL))
        self.cached: dict[bytes, int] = {}

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def hold(self, blocks: Iterable[int]) -> None:
        """References of a job: only blocks that somebody owns may be given to a job."""
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} is free"
            self.refs[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
            assert self.refs[block] >= 0
            if self.refs[block] == 0:
                self.free.append(block)

    def take(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            assert self.refs[block] == 0
            self.refs[block] = 1
        self.cached = {h: b for h, b in self.cached.items() if b not in taken}
        return taken

    def cache(self, request: Request, num_tokens: int) -> None:
        for block_hash, block in zip(
            request.hashes[: num_tokens // SIZE], request.blocks, strict=False
        ):
            self.cached.setdefault(block_hash, block)

    def hit(self, request: Request) -> list[int]:
        found = []
        for block_hash in request.hashes[: (request.num_tokens - 1) // SIZE]:
            if block_hash not in self.cached:
                break
            found.append(self.cached[block_hash])
        return found
