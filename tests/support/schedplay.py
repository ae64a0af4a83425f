"""Playbooks for the scheduler side's core: events in, commands out, and the books kept beside it.

``Play`` sends events to a core that validates itself after each, keeps the references that its
commands take and give back, and refuses a job whose blocks are given back twice or wrongly.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from kvcommon.messages import (
    GroupHit,
    JobEnd,
    JobOutcome,
    LoadJob,
    Lookup,
    LookupResult,
    Message,
    RankIdentity,
    SaveJob,
    StepPlan,
    StepVerdict,
)
from kvsched.core.commands import (
    AnswerMatch,
    FreeBlocks,
    HoldBlocks,
    SchedCommand,
    SendToDaemon,
    TellModel,
)
from kvsched.core.core import CoreConfig, SchedCore
from kvsched.core.events import (
    BlocksAllocated,
    DaemonLost,
    DaemonReady,
    JobsReported,
    LookupAnswered,
    MatchAsked,
    PlanAcked,
    RanksKnown,
    RequestAdded,
    RequestFinished,
    SchedEvent,
    ScheduledRequest,
    StepFinished,
    StepScheduled,
)

MS = 1_000_000
SIZE = 16

M = TypeVar("M", bound=Message)


def hashes(count: int, text: str = "p") -> tuple[bytes, ...]:
    """Chained block hashes of a text."""
    found = []
    last = text.encode()
    for _ in range(count):
        last = hashlib.sha256(last).digest()[:16]
        found.append(last)
    return tuple(found)


def told(commands: Iterable[SchedCommand], kind: type[M], rank: int | None = None) -> list[M]:
    """Messages of one kind among commands, to one rank or to all."""
    return [
        command.body
        for command in commands
        if isinstance(command, SendToDaemon)
        and isinstance(command.body, kind)
        and rank in {None, command.rank}
    ]


def answer(commands: Sequence[SchedCommand]) -> AnswerMatch:
    """The one answer to a ``MatchAsked``."""
    (found,) = [command for command in commands if isinstance(command, AnswerMatch)]
    return found


def model(commands: Sequence[SchedCommand]) -> TellModel | None:
    """What the model side is told, at most once."""
    found = [command for command in commands if isinstance(command, TellModel)]
    assert len(found) <= 1
    return found[0] if found else None


def saves(commands: Sequence[SchedCommand]) -> list[SaveJob]:
    """The saves of the plan, the same for every rank."""
    plans = told(commands, StepPlan)
    assert all(plan == plans[0] for plan in plans)
    return list(plans[0].saves) if plans else []


def loads(commands: Sequence[SchedCommand]) -> list[LoadJob]:
    """The loads of the plan."""
    plans = told(commands, StepPlan)
    return list(plans[0].loads) if plans else []


def saved_blocks(commands: Sequence[SchedCommand]) -> list[int]:
    """Block ids of all saves of the plan."""
    return [block_id for job in saves(commands) for block_id in job.block_ids]


def verdicts(commands: Sequence[SchedCommand], rank: int | None = None) -> list[StepVerdict]:
    """The verdicts among commands."""
    return told(commands, StepVerdict, rank)


class Play:
    """One core and everything that was said to it."""

    def __init__(self, *, ranks: int = 1, ready: bool = True, **config: object) -> None:
        base = CoreConfig(block_size=SIZE, sync_is_safe=True, validate=True)
        self.config = msgspec.structs.replace(base, **config)
        self.core = SchedCore(self.config)
        self.now_ns = 1_000 * MS
        self.ranks = ranks
        self.story: list[tuple[SchedEvent, list[SchedCommand]]] = []
        #: Job → blocks held for it now.
        self.held: dict[int, tuple[int, ...]] = {}
        self.freed: list[int] = []
        if ready:
            self.ready()

    def say(self, event: SchedEvent) -> list[SchedCommand]:
        """Handle an event; keep the books."""
        same = self._only_waits(event)
        commands = self.core.handle(event)
        if same is not None:
            assert [getattr(each, "num_tokens", 0) for each in commands] == [None]
            assert repr(self.core._state.requests) == same
        self.story.append((event, commands))
        for command in commands:
            if isinstance(command, HoldBlocks):
                assert command.job_id not in self.held
                assert command.job_id not in self.freed
                self.held[command.job_id] = command.block_ids
            elif isinstance(command, FreeBlocks):
                assert self.held.pop(command.job_id) == command.block_ids
                self.freed.append(command.job_id)
        assert sum(map(len, self.held.values())) == self.core.num_held_blocks
        return commands

    def _only_waits(self, event: SchedEvent) -> str | None:
        """The requests' records, if the core says that this event would change none of them."""
        if not isinstance(event, MatchAsked) or event.block_hashes:
            return None
        waits = self.core.only_waits(event.request_id, event.num_tokens, event.now_ns)
        return repr(self.core._state.requests) if waits else None

    def serving(self) -> bool:
        """Plans and lookups are sent."""
        return self.core.serving

    def busy(self) -> bool:
        """VLLM must keep stepping."""
        return self.core.has_pending

    def wants_step(self) -> bool:
        """The next step must be told of."""
        return self.core.wants_step

    def later(self, ms: float) -> None:
        """Let time pass."""
        self.now_ns += int(ms * MS)

    def ready(self, epoch: int = 7) -> None:
        """Every rank is known and attached."""
        named = tuple(RankIdentity(rank=r, fingerprint=f"f{r}") for r in range(self.ranks))
        self.say(RanksKnown(now_ns=self.now_ns, ranks=named))
        for rank in range(self.ranks):
            self.daemon(rank, epoch=epoch)

    def daemon(self, rank: int = 0, *, epoch: int = 7, attached: bool = True) -> list[SchedCommand]:
        """A ``Welcome``."""
        event = DaemonReady(now_ns=self.now_ns, rank=rank, epoch=epoch, attached=attached)
        return self.say(event)

    def lost(self, rank: int = 0, *, dead: bool) -> list[SchedCommand]:
        """A daemon is gone."""
        return self.say(DaemonLost(now_ns=self.now_ns, rank=rank, dead=dead, reason="test"))

    def add(
        self, name: str, num_tokens: int, text: str = "p", *, skip_lookup: bool = False
    ) -> list[SchedCommand]:
        """A request comes in."""
        return self.say(
            RequestAdded(
                now_ns=self.now_ns,
                request_id=name,
                num_tokens=num_tokens,
                block_hashes=hashes(num_tokens // SIZE, text),
                skip_lookup=skip_lookup,
            )
        )

    def found(
        self,
        commands: Sequence[SchedCommand],
        num_blocks: int,
        *,
        staged: bool = False,
        reason: str = "",
    ) -> list[SchedCommand]:
        """The lookup among ``commands`` is answered."""
        (lookup,) = told(commands, Lookup)
        return self.found_id(lookup.lookup_id, num_blocks, staged=staged, reason=reason)

    def found_id(
        self, lookup_id: int, num_blocks: int, *, staged: bool = False, reason: str = ""
    ) -> list[SchedCommand]:
        """A lookup is answered."""
        result = LookupResult(
            lookup_id=lookup_id,
            hits=(GroupHit(group=0, num_blocks=num_blocks),),
            staged=staged,
            reason=reason,
        )
        return self.say(LookupAnswered(now_ns=self.now_ns, rank=0, result=result))

    def ask(
        self, name: str, num_tokens: int, local: int = 0, block_hashes: tuple[bytes, ...] = ()
    ) -> AnswerMatch:
        """VLLM asks for a match."""
        return answer(self.ask_all(name, num_tokens, local, block_hashes))

    def ask_all(
        self, name: str, num_tokens: int, local: int = 0, block_hashes: tuple[bytes, ...] = ()
    ) -> list[SchedCommand]:
        """VLLM asks for a match; everything that was answered."""
        return self.say(
            MatchAsked(
                now_ns=self.now_ns,
                request_id=name,
                num_tokens=num_tokens,
                num_local_tokens=local,
                block_hashes=block_hashes,
            )
        )

    def alloc(self, name: str, blocks: Iterable[int], external: int = 0) -> list[SchedCommand]:
        """VLLM admits a request."""
        return self.say(
            BlocksAllocated(
                now_ns=self.now_ns,
                request_id=name,
                block_ids=tuple(blocks),
                num_external_tokens=external,
            )
        )

    def step(
        self, step: int, *requests: ScheduledRequest, preempted: tuple[str, ...] = ()
    ) -> list[SchedCommand]:
        """A step is scheduled."""
        return self.say(
            StepScheduled(now_ns=self.now_ns, step=step, requests=requests, preempted=preempted)
        )

    def done(self, step: int, *invalid: int) -> list[SchedCommand]:
        """A step's output is back."""
        return self.say(StepFinished(now_ns=self.now_ns, step=step, invalid_block_ids=invalid))

    def ack(self, step: int, rank: int = 0) -> list[SchedCommand]:
        """A plan is acknowledged."""
        return self.say(PlanAcked(now_ns=self.now_ns, rank=rank, step=step))

    def end(
        self,
        *job_ids: int,
        rank: int = 0,
        outcome: JobOutcome = JobOutcome.DONE,
        failed: tuple[int, ...] = (),
        num_bytes: int = 0,
        duration_us: int = 0,
    ) -> list[SchedCommand]:
        """Jobs end on one rank."""
        ends = tuple(
            JobEnd(
                job_id=job_id,
                outcome=outcome,
                failed_blocks=failed,
                num_bytes=num_bytes,
                duration_us=duration_us,
            )
            for job_id in job_ids
        )
        return self.say(JobsReported(now_ns=self.now_ns, rank=rank, ends=ends))

    def end_all(self) -> None:
        """Every open job ends well on every rank."""
        for rank in range(self.ranks):
            self.end(*self.core.open_jobs(rank), rank=rank)

    def finish(self, name: str) -> list[SchedCommand]:
        """A request ends."""
        return self.say(RequestFinished(now_ns=self.now_ns, request_id=name))

    def admit(
        self, name: str, num_tokens: int, hit: int, blocks: Iterable[int], text: str = "p"
    ) -> AnswerMatch:
        """Add, look up, ask and admit with the whole of a hit of so many blocks."""
        commands = self.add(name, num_tokens, text)
        if commands:
            self.found(commands, hit)
        match = self.ask(name, num_tokens)
        self.alloc(name, blocks, match.num_tokens or 0)
        return match

    def replay(self) -> None:
        """A fresh core answers the same, byte for byte."""
        config = msgspec.msgpack.decode(msgspec.msgpack.encode(self.config), type=CoreConfig)
        fresh = SchedCore(config)
        decoder = msgspec.msgpack.Decoder(SchedEvent)
        for event, commands in self.story:
            again = fresh.handle(decoder.decode(msgspec.msgpack.encode(event)))
            assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(commands), event


def new(name: str, blocks: Iterable[int], computed: int, scheduled: int) -> ScheduledRequest:
    """A request as new or resumed in a step: the whole block table."""
    return ScheduledRequest(
        request_id=name,
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        replace=True,
        block_ids=tuple(blocks),
    )


def more(
    name: str,
    computed: int,
    scheduled: int,
    blocks: Iterable[int] = (),
    block_hashes: tuple[bytes, ...] = (),
) -> ScheduledRequest:
    """A running request in a step: what was appended."""
    return ScheduledRequest(
        request_id=name,
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        replace=False,
        block_ids=tuple(blocks),
        new_block_hashes=block_hashes,
    )


def counted(blocks: Iterable[int]) -> Counter[int]:
    """How often each block occurs."""
    return Counter(blocks)
