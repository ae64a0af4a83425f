"""The records of loads: batches, and the page word that layerwise ones write together."""

from dataclasses import dataclass, field

from kvcommon import reasons
from kvcommon.layout import GroupLayout
from kvworker.core.engines import Engine
from kvworker.core.jobs import Block, Job, Part
from kvworker.core.states import BlockState, LoadState, moved
from kvworker.outcome import Outcome

#: The progress page has 40 bits for a step.
MAX_STEP = (1 << 40) - 1
#: What an outcome other than OK makes of a block, and why.
MEANING: dict[Outcome, tuple[BlockState, str]] = {
    Outcome.MISS: (BlockState.FAILED, reasons.EVICTED),
    Outcome.EXPIRED: (BlockState.FAILED, reasons.EXPIRED),
    Outcome.DOWN: (BlockState.FAILED, reasons.STORE_DOWN),
    Outcome.EXISTS: (BlockState.FAILED, reasons.TRANSFER_FAILED),
    Outcome.FULL: (BlockState.FAILED, reasons.TRANSFER_FAILED),
    Outcome.FAILED: (BlockState.FAILED, reasons.TRANSFER_FAILED),
    Outcome.CANCELLED: (BlockState.CANCELLED, reasons.CANCELLED),
}


@dataclass(eq=False)
class PageTurn:
    """The progress page's word of one step: written once all its layerwise loads are over.

    A step with one layerwise batch advances layer by layer instead (``LoadLayers.publish``).
    """

    step: int
    #: What "all layers" is in the page.
    num_layers: int
    #: Layerwise batches that are not over yet.
    num_open: int = 0
    #: A block of the step has failed.
    failed: bool = False
    #: The one batch publishes its layers itself.
    by_layer: bool = False
    #: ``LoadLayers`` has published, or is publishing, the last layer.
    published: bool = False


@dataclass(eq=False)
class LoadBatch:
    """The layerwise or the asynchronous loads of one step and group of one rank."""

    engine: Engine
    incarnation: int
    step: int
    group: GroupLayout
    #: Jobs that have not ended.
    jobs: list[Job]
    #: None for asynchronous loads.
    page: PageTurn | None
    state: LoadState = LoadState.PLANNED
    story: list[str] = field(default_factory=list)
    #: Op in flight, else 0.
    op: int = 0
    #: ``Cancel`` was sent for it.
    stopping: bool = False
    #: Keys of which a get reference is held.
    held: tuple[str, ...] = ()
    #: Nothing more will be loaded; the page has been told.
    over: bool = False

    @property
    def name(self) -> str:
        """For errors."""
        kind = "asynchronous" if self.page is None else "layerwise"
        return f"{kind} loads of step {self.step}, group {self.group.group} of {self.engine.key}"

    @property
    def current(self) -> bool:
        """The memory that it was planned for is mapped."""
        return self.engine.attached and self.engine.incarnation == self.incarnation

    def move(self, to: LoadState) -> None:
        """Change state."""
        self.state = moved(self.name, self.state, to, self.story)
        self.story.append(to.value)

    def lose(self, block: Block, to: BlockState, reason: str) -> None:
        """A block will not hold what was asked for."""
        block.move(to, reason)
        if self.page is not None:
            self.page.failed = True

    def parts(self, state: BlockState) -> list[Part]:
        """Return the blocks of open jobs that are in a state."""
        return [
            Part(job, block) for job in self.jobs for block in job.blocks if block.state is state
        ]
