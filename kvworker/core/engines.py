"""One record per rank that is or was attached, or whose scheduler side has said ``Hello``."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcommon.ids import Fingerprint
from kvcommon.layout import GroupLayout
from kvcommon.messages import Attach, RankIdentity
from kvworker.core.config import CoreConfig
from kvworker.core.states import MapState, moved

_NO_MARK = Fingerprint("")


@dataclass
class Progress:
    """How far the model side is, as its messages say: they may come before the step's plan."""

    #: Steps remembered.
    memory: int
    #: Newest step that has begun; every earlier one has begun too (the gate of rule 5).
    begun: int = 0
    #: Newest step whose output came back: it has begun, whether or not the model side could say so.
    returned: int = 0
    #: Step → layers written, of the last steps.
    computed: dict[int, int] = field(default_factory=dict)
    #: Device event of the newest message: what all of them say is so once it is reached. The
    #: stream that it stands in is in order, so a newer event covers every older one.
    event: bytes = b""

    @property
    def gate(self) -> int:
        """Newest step in which loads may be written."""
        return max(self.begun, self.returned)

    def reset(self) -> None:
        """Forget everything: another incarnation counts its steps anew."""
        self.begun = self.returned = 0
        self.computed.clear()
        self.event = b""

    def note_computed(self, step: int, num_layers: int) -> None:
        """Remember that the first ``num_layers`` layers of ``step`` are written."""
        self.computed[step] = max(self.computed.get(step, 0), num_layers)
        while len(self.computed) > self.memory:
            del self.computed[next(iter(self.computed))]


@dataclass(eq=False)
class Engine:
    """One rank of one engine."""

    key: str
    progress: Progress
    state: MapState = MapState.ABSENT
    story: list[str] = field(default_factory=list)
    #: Op of ``MapEngine`` or ``UnmapEngine`` in flight, else 0.
    op: int = 0
    #: Incarnation of the model side that is heard; 0: none.
    model_epoch: int = 0
    #: Counts the attaches taken up: tells the memory of one from that of the next.
    incarnation: int = 0
    #: What is mapped, or being mapped; None also if it is not wanted any more.
    attach: Attach | None = None
    #: An attach that waits until the one before it is unmapped.
    waiting: Attach | None = None
    #: What ``MapEngine`` said it can do.
    capabilities: tuple[str, ...] = ()
    #: Identity of what this rank stores, while ``attach`` is there.
    mark: Fingerprint = _NO_MARK
    #: Incarnation of the scheduler side that is heard; 0: none.
    scheduler_epoch: int = 0
    #: Scheduler side whose steps this incarnation of the model side runs; 0: not known yet.
    steps_epoch: int = 0
    #: Every rank of the engine, from ``Hello``.
    ranks: tuple[RankIdentity, ...] = ()
    #: Prefixes to be removed from the store as soon as that is possible.
    reset_prefixes: tuple[str, ...] = ()
    #: Batches of this rank that are not closed.
    num_batches: int = 0
    #: For status: column → number.
    totals: dict[str, int] = field(default_factory=dict)

    @property
    def attached(self) -> bool:
        """Lookups and plans are served."""
        return self.state is MapState.MAPPED

    @property
    def idle(self) -> bool:
        """Nothing would be lost by forgetting it."""
        quiet = self.state is MapState.ABSENT and not self.scheduler_epoch
        return quiet and not self.num_batches and not self.reset_prefixes and not self.waiting

    def move(self, to: MapState) -> None:
        """Change the state of the mapping."""
        self.state = moved(self.key, self.state, to, self.story)
        self.story = [*self.story[-7:], to.value]

    def note_begun(self, step: int) -> None:
        """The model process has begun a step."""
        self.steps_epoch = self.scheduler_epoch or self.steps_epoch
        self.progress.begun = max(self.progress.begun, step)

    def group(self, group: int) -> GroupLayout | None:
        """Return the layout of a group of the mapped memory, if there is one of that number."""
        if self.attach is None:
            return None
        for layout in self.attach.layout.groups:
            if layout.group == group:
                return layout
        return None

    def ready_layers(self, step: int, group: GroupLayout) -> int:
        """Return how many layers of the group can be read after what was computed in ``step``.

        With several groups a number of layers does not say which of them, so that only all of
        them count.
        """
        computed = self.progress.computed.get(step, 0)
        groups = self.attach.layout.groups if self.attach is not None else (group,)
        if len(groups) > 1:
            total = sum(len(layout.layers) for layout in groups)
            return len(group.layers) if computed >= total else 0
        return min(computed, len(group.layers))


class Engines:
    """All records, oldest first."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._engines: dict[str, Engine] = {}

    def __iter__(self) -> Iterator[Engine]:
        """Iterate over a copy: records may come and go meanwhile."""
        return iter(tuple(self._engines.values()))

    def get(self, key: str) -> Engine | None:
        """Return the record of a rank, if there is one."""
        return self._engines.get(key)

    def meet(self, key: str) -> Engine:
        """Return the record of a rank; make one, and forget idle ones beyond the bound."""
        engine = self._engines.get(key)
        if engine is None:
            engine = Engine(key=key, progress=Progress(self._config.step_memory))
            surplus = len(self._engines) + 1 - self._config.max_engines
            for old in tuple(self._engines.values()):
                if surplus > 0 and old.idle:
                    del self._engines[old.key]
                    surplus -= 1
            self._engines[key] = engine
        return engine
