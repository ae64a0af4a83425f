"""The record of one save batch, and what a store's words mean for its blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcommon import reasons
from kvcommon.layout import GroupLayout
from kvworker.core.engines import Engine
from kvworker.core.jobs import Block, Job, Part
from kvworker.core.states import BlockState, SaveState, moved
from kvworker.outcome import Outcome

#: What an outcome other than OK makes of a block, and why.
MEANING: dict[Outcome, tuple[BlockState, str]] = {
    Outcome.EXISTS: (BlockState.SKIPPED, reasons.EXISTS),
    Outcome.FULL: (BlockState.FAILED, reasons.STORE_FULL),
    Outcome.DOWN: (BlockState.FAILED, reasons.STORE_DOWN),
    Outcome.EXPIRED: (BlockState.FAILED, reasons.EXPIRED),
    Outcome.MISS: (BlockState.FAILED, reasons.TRANSFER_FAILED),
    Outcome.FAILED: (BlockState.FAILED, reasons.TRANSFER_FAILED),
    Outcome.CANCELLED: (BlockState.CANCELLED, reasons.CANCELLED),
}


@dataclass(eq=False)
class SaveBatch:
    """The saves of one step and group of one rank."""

    engine: Engine
    incarnation: int
    step: int
    group: GroupLayout
    #: Jobs that have not ended.
    jobs: list[Job]
    state: SaveState = SaveState.WAITING
    story: list[str] = field(default_factory=list)
    #: Op in flight, else 0.
    op: int = 0
    #: ``Cancel`` was sent for it.
    stopping: bool = False
    #: Layers that can be read.
    ready: int = 0
    verdict: bool = False
    #: The store takes whole objects; there are no sessions (``PutsOpened.whole``).
    whole: bool = False
    #: When the verdict came.
    verdict_ns: int = 0
    #: The layers that are missing will never be computed.
    hopeless: bool = False
    #: Keys of ended jobs whose session is open still.
    leftover: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For errors."""
        return f"saves of step {self.step}, group {self.group.group} of {self.engine.key}"

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return len(self.group.layers)

    def move(self, to: SaveState) -> None:
        """Change state."""
        self.state = moved(self.name, self.state, to, self.story)
        self.story.append(to.value)

    def parts(self, state: BlockState) -> Iterator[Part]:
        """Yield the blocks of open jobs that are in a state."""
        for job in self.jobs:
            for block in job.blocks:
                if block.state is state:
                    yield Part(job, block)

    def ready_layers(self, job: Job) -> int:
        """Return how many layers of the job's blocks can be read once the step has begun."""
        return self.num_layers if job.computed else self.ready

    def can_complete(self, job: Job) -> bool:
        """Say whether every layer of the job's blocks can be read by now."""
        begun = self.engine.progress.begun >= self.step
        return begun and self.ready_layers(job) == self.num_layers

    def is_due(self, job: Job, block: Block) -> bool:
        """Say whether the object can be published: written, or (whole) ready to be."""
        return self.can_complete(job) if self.whole else self.is_complete(block)

    def is_complete(self, block: Block) -> bool:
        """Say whether every byte of the object was written."""
        return block.num_layers == self.num_layers and block.num_bytes == self.group.object_bytes
