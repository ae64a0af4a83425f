"""What the simple vLLM keeps: requests, steps in flight, and the block pool."""

import dataclasses
import math

from kvsched.core.commands import TellModel
from tests.pair.store import HASHES

SIZE = 4
POOL = 16
CHUNK = 12


@dataclasses.dataclass(eq=False)
class Request:
    """VLLM's request."""

    name: str
    text: str
    num_tokens: int
    num_new: int
    status: str = "waiting"
    computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    #: Outputs of steps planned before this changed are thrown away.
    generation: int = 0
    told: int = 0
    placeholders: int = 0
    recved: set[int] = dataclasses.field(default_factory=set)

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return HASHES[self.text][: self.num_tokens // SIZE]


@dataclasses.dataclass
class Part:
    """One request of a step."""

    request: Request
    blocks: list[int]
    start: int
    end: int
    samples: bool
    generation: int
    replace: bool
    new_blocks: list[int]

    @property
    def targets(self) -> range:
        """Indices of the blocks that it computes."""
        return range(self.start // SIZE, math.ceil(self.end / SIZE))


@dataclasses.dataclass
class Step:
    """A step in flight."""

    number: int
    parts: list[Part]
    tell: TellModel | None
    #: Layers computed; -1: not begun.
    layer: int = -1
    is_over: bool = False
    invalid: set[int] = dataclasses.field(default_factory=set)
    recved: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    frees: list[int] = dataclasses.field(default_factory=list)


class Pool:
    """References, the free list, and which block holds which hash."""

    def __init__(self) -> None:
        self.refs = [1] + [0] * (POOL - 1)
        self.free = list(range(1, POOL))
        self.cached: dict[bytes, int] = {}

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self.refs[block] > 0, "rule 1: a block is given back twice"
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)

    def take(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.refs[block] = 1
        self.cached = {h: b for h, b in self.cached.items() if b not in taken}
        return taken
