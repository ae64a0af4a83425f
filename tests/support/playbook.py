"""Playbooks of the daemon's core: events in, commands out, as a conversation one can read.

Every event goes through a real ``WorkerCore`` that validates itself; nothing is mocked. Operations
are answered by hand, ``OK`` unless the test says otherwise.
"""

from collections.abc import Sequence
from typing import Any, TypeVar, Union

from kvcommon.keys import Namespace, fingerprint, store_key
from kvcommon.layout import CacheLayout, GroupLayout, Layer, Plane
from kvcommon.memory.handles import LocalHandle, PageHandle
from kvcommon.messages import (
    Attach,
    Hello,
    JobEnd,
    JobsEnded,
    LayersComputed,
    LoadJob,
    Lookup,
    LookupGroup,
    Message,
    RankIdentity,
    SaveJob,
    StepBegun,
    StepPlan,
    StepVerdict,
    StoreState,
)
from kvworker.core.commands import (
    ClosePuts,
    FindKeys,
    LoadLayers,
    MapEngine,
    OpenGets,
    OpenPuts,
    ProbeStore,
    SendToModel,
    SendToScheduler,
    UnmapEngine,
    WorkerCommand,
    WriteLayers,
)
from kvworker.core.core import CoreConfig, WorkerCore
from kvworker.core.events import ModelSaid, PeerLost, SchedulerSaid, Ticked, WorkerEvent
from kvworker.core.kernel import ANSWERS
from kvworker.outcome import Outcome

ENGINE = "llm#0"
MODEL, SCHEDULER = 11, 21
NUM_LAYERS, NUM_BLOCKS, LAYER_BYTES = 3, 32, 16
OBJECT_BYTES = NUM_LAYERS * LAYER_BYTES
NAMESPACE = Namespace(
    model="tiny",
    revision="1",
    dtype="float32",
    cache_dtype="auto",
    block_sizes=(4,),
    layout=("l",),
    layers=(0, NUM_LAYERS),
    tensor_parallel=1,
    pipeline_parallel=1,
    rank=(0, 0),
    hash_algorithm="sha256",
    hash_seed="0",
)
MARK = fingerprint(NAMESPACE)
Outcomes = Union[Outcome, Sequence[Outcome]]
CommandT = TypeVar("CommandT")


def group_layout(group: int = 0, num_layers: int = NUM_LAYERS) -> GroupLayout:
    """A group of layers of two planes of 8 bytes a block."""
    layers = []
    for index in range(num_layers):
        planes = tuple(
            Plane(
                storage=0,
                dtype="uint8",
                shape=(NUM_BLOCKS, 8),
                stride=(8, 1),
                offset=(2 * index + side) * NUM_BLOCKS * 8,
                block_stride=8,
                segments=((0, 8),),
            )
            for side in range(2)
        )
        layers.append(Layer(name=f"layers.{group}.{index}", planes=planes))
    return GroupLayout(group=group, block_size=4, num_blocks=NUM_BLOCKS, layers=tuple(layers))


def attach(
    device: str = "cpu:0",
    namespace: Namespace = NAMESPACE,
    groups: Sequence[GroupLayout] = (),
    address: int = 4096,
) -> Attach:
    """An ``Attach``; another ``address`` is other memory."""
    return Attach(
        pid=100,
        device=device,
        storages=(LocalHandle(address=address, size=4096),),
        layout=CacheLayout(groups=tuple(groups) or (group_layout(),), storage_bytes=(4096,)),
        page=PageHandle(storage=LocalHandle(address=address + 4096, size=4096)),
        namespace=namespace,
    )


def block_hash(number: int) -> bytes:
    """The hash of a block, 16 bytes."""
    return number.to_bytes(16, "big")


def key(number: int, mark: str = MARK, group: int = 0) -> str:
    """The store key of a block."""
    return store_key(mark, group, block_hash(number))  # type: ignore[arg-type]


def load(
    job_id: int, blocks: dict[int, int], *, layerwise: bool = False, group: int = 0
) -> LoadJob:
    """A load of ``{block id: hash number}``."""
    return LoadJob(
        job_id=job_id,
        request_id=f"r{job_id}",
        group=group,
        block_ids=tuple(blocks),
        block_hashes=tuple(block_hash(number) for number in blocks.values()),
        layerwise=layerwise,
    )


def save(job_id: int, blocks: dict[int, int], *, computed: bool = False, group: int = 0) -> SaveJob:
    """A save of ``{block id: hash number}``."""
    return SaveJob(
        job_id=job_id,
        request_id=f"r{job_id}",
        group=group,
        block_ids=tuple(blocks),
        block_hashes=tuple(block_hash(number) for number in blocks.values()),
        computed=computed,
    )


def answer_to(command: Any, outcomes: Outcomes, now_ns: int, **fields: Any) -> WorkerEvent:
    """The event that answers a command; ``outcomes`` one for all keys, or one each."""
    if isinstance(command, (MapEngine, UnmapEngine)):
        fields["engine"] = command.engine
    elif isinstance(command, ProbeStore):
        fields.setdefault("state", StoreState.UP)
    elif isinstance(command, ClosePuts):
        fields["ended"] = _each(outcomes, len(command.end))
        fields["revoked"] = (Outcome.OK,) * len(command.revoke)
    elif isinstance(command, (FindKeys, OpenPuts, WriteLayers, OpenGets, LoadLayers)):
        each = fields["outcomes"] = _each(outcomes, len(command.keys))
        if isinstance(command, WriteLayers):
            due = (command.end_layer - command.first_layer) * LAYER_BYTES
            fields.setdefault("num_bytes", tuple(due * (one is Outcome.OK) for one in each))
        if isinstance(command, LoadLayers):
            fields.setdefault("num_bytes", OBJECT_BYTES * each.count(Outcome.OK))
    event: WorkerEvent = ANSWERS[type(command)](now_ns=now_ns, op=command.op, **fields)
    return event


def _each(outcomes: Outcomes, number: int) -> tuple[Outcome, ...]:
    return (outcomes,) * number if isinstance(outcomes, Outcome) else tuple(outcomes)


class Playbook:
    """A core, and everything that was said to it and by it."""

    def __init__(self, core_type: type[WorkerCore] = WorkerCore, **config: Any) -> None:
        self.config = CoreConfig(device="cpu:0", store="memory", pid=77, validate=True, **config)
        self.core = core_type(self.config)
        self.now_ns = 0
        #: Every event, and the commands that it got.
        self.log: list[tuple[WorkerEvent, list[WorkerCommand]]] = []

    def handle(self, event: WorkerEvent) -> list[WorkerCommand]:
        commands = self.core.handle(event)
        self.log.append((event, commands))
        return commands

    def _later(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def model(
        self, body: Message, *, epoch: int = MODEL, engine: str = ENGINE
    ) -> list[WorkerCommand]:
        """The model side says something."""
        event = ModelSaid(now_ns=self._later(), engine=engine, epoch=epoch, body=body)  # type: ignore[arg-type]
        return self.handle(event)

    def scheduler(
        self, body: Message, *, epoch: int = SCHEDULER, engine: str = ENGINE
    ) -> list[WorkerCommand]:
        """The scheduler side says something."""
        event = SchedulerSaid(now_ns=self._later(), engine=engine, epoch=epoch, body=body)  # type: ignore[arg-type]
        return self.handle(event)

    def lose(self, role: str, *, epoch: int = 0, engine: str = ENGINE) -> list[WorkerCommand]:
        """A side is gone."""
        epoch = epoch or (MODEL if role == "model" else SCHEDULER)
        event = PeerLost(
            now_ns=self._later(), engine=engine, role=role, epoch=epoch, reason="it died"
        )
        return self.handle(event)

    def tick(self, ms: int = 0) -> list[WorkerCommand]:
        """Time passes."""
        self.now_ns += ms * 1_000_000
        return self.handle(Ticked(now_ns=self._later()))

    def answer(
        self, command: WorkerCommand, outcomes: Outcomes = Outcome.OK, **fields: Any
    ) -> list[WorkerCommand]:
        """An operation ends."""
        return self.handle(answer_to(command, outcomes, self._later(), **fields))

    # What nearly every playbook begins with, and goes on with.

    def attach(self, *, epoch: int = MODEL, engine: str = ENGINE, **fields: Any) -> None:
        """A model side attaches and is mapped."""
        commands = self.model(attach(**fields), epoch=epoch, engine=engine)
        self.answer(only(commands, MapEngine))

    def hello(
        self,
        open_jobs: Sequence[int] = (),
        *,
        epoch: int = SCHEDULER,
        engine: str = ENGINE,
        marks: Sequence[str] = (MARK,),
    ) -> list[WorkerCommand]:
        """A scheduler side opens its conversation."""
        ranks = tuple(RankIdentity(rank=i, fingerprint=mark) for i, mark in enumerate(marks))
        body = Hello(pid=200, ranks=ranks, open_jobs=tuple(open_jobs))
        return self.scheduler(body, epoch=epoch, engine=engine)

    def plan(self, step: int, *jobs: Union[LoadJob, SaveJob], **who: Any) -> list[WorkerCommand]:
        """A plan arrives."""
        loads = tuple(job for job in jobs if isinstance(job, LoadJob))
        saves = tuple(job for job in jobs if isinstance(job, SaveJob))
        return self.scheduler(StepPlan(step=step, loads=loads, saves=saves), **who)

    def begin(self, step: int, **who: Any) -> list[WorkerCommand]:
        """The model process begins a step."""
        return self.model(StepBegun(step=step), **who)

    def computed(self, step: int, num_layers: int = NUM_LAYERS, **who: Any) -> list[WorkerCommand]:
        """Layers of a step are written."""
        return self.model(LayersComputed(step=step, num_layers=num_layers), **who)

    def verdict(self, step: int, *tainted: int, **who: Any) -> list[WorkerCommand]:
        """A step's output came back."""
        return self.scheduler(StepVerdict(step=step, tainted=tainted), **who)

    def store_down(self) -> list[WorkerCommand]:
        """The breaker opens: lookups find the store unreachable. Returns the last commands."""
        commands: list[WorkerCommand] = []
        for lookup_id in range(900, 900 + self.config.store_down_after):
            groups = (LookupGroup(group=0, block_hashes=(block_hash(999),)),)
            asked = self.scheduler(Lookup(lookup_id=lookup_id, request_id="x", groups=groups))
            commands = self.answer(only(asked, FindKeys), Outcome.DOWN)
        return commands

    def store_up(self, ms: int = 1000) -> list[WorkerCommand]:
        """A probe finds the store well again."""
        return self.answer(only(self.tick(ms), ProbeStore), state=StoreState.UP)


def started(**config: Any) -> Playbook:
    """A playbook whose rank is attached and whose scheduler side is greeted."""
    play = Playbook(**config)
    play.attach()
    play.hello()
    return play


def kinds(commands: Sequence[WorkerCommand]) -> list[str]:
    """The commands' names; of messages, the message's name and to whom."""
    names = []
    for command in commands:
        name = type(command).__name__
        if isinstance(command, SendToModel):
            name = f"{type(command.body).__name__} → model"
        elif isinstance(command, SendToScheduler):
            name = f"{type(command.body).__name__} → scheduler"
        names.append(name)
    return names


def only(commands: Sequence[WorkerCommand], kind: type[CommandT]) -> CommandT:
    """The one command of a kind."""
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, kinds(commands)
    return found[0]


def said(commands: Sequence[WorkerCommand], kind: type[CommandT]) -> CommandT:
    """The one message of a kind, to whichever side."""
    found = [
        command.body
        for command in commands
        if isinstance(command, (SendToModel, SendToScheduler)) and isinstance(command.body, kind)
    ]
    assert len(found) == 1, kinds(commands)
    return found[0]


def ends(commands: Sequence[WorkerCommand], side: str = "scheduler") -> dict[int, JobEnd]:
    """How jobs ended, as one side is told: job id → end."""
    kind = SendToScheduler if side == "scheduler" else SendToModel
    result: dict[int, JobEnd] = {}
    for command in commands:
        if isinstance(command, kind) and isinstance(command.body, JobsEnded):
            for end in command.body.ends:
                assert end.job_id not in result
                result[end.job_id] = end
    return result
