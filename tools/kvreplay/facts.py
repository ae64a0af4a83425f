"""Gathers what decided a request's fate from its records."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcommon import messages as msg
from kvcommon import reasons
from kvreplay.links import RequestLinks, Touch
from kvreplay.loading import Entry
from kvreplay.ops import key_hash, key_mark, plan_jobs, rank_of
from kvreplay.words import engine_name
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome


@dataclass
class JobFacts:
    """One job of the request."""

    job_id: int
    step: int
    is_load: bool
    layerwise: bool
    num_blocks: int
    tainted: bool = False
    #: Ranks whose daemon was told of it.
    ranks: list[int] = field(default_factory=list)
    #: Ends by rank.
    ends: dict[int, msg.JobEnd] = field(default_factory=dict)
    #: Ranks whose daemon was lost before it had ended the job.
    lost: list[int] = field(default_factory=list)
    #: Its daemon gave it up with the engine, and nobody was left to be told.
    engine_lost: bool = False
    #: How long after its plan vLLM was told that it failed, while no daemon had said so; 0: never.
    given_up_ns: int = 0
    #: Blocks that the request's newest lookup had not found.
    num_unknown: int = 0

    @property
    def failed_blocks(self) -> list[int]:
        """Blocks that failed on any rank."""
        return sorted({block for end in self.ends.values() for block in end.failed_blocks})

    @property
    def reasons(self) -> list[str]:
        """Every reason word, once; ``late`` for what was cancelled because it was waited for too
        long.
        """
        words = {end.reason for end in self.ends.values() if end.reason}
        if self.given_up_ns and words == {reasons.CANCELLED}:
            return [reasons.LATE]
        return sorted(words)

    @property
    def is_over(self) -> bool:
        """Every rank has ended it, as far as is known."""
        return bool(self.ends) and all(rank in self.ends for rank in self.ranks)

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks that will never end it."""
        return sorted(set(self.lost) - self.ends.keys())

    def ended(self, *outcomes: msg.JobOutcome) -> bool:
        """Some rank ended the job like this."""
        return any(end.outcome in outcomes for end in self.ends.values())


@dataclass
class Facts:
    """What is known of a request once its records were read."""

    request_id: str
    num_tokens: int | None = None
    #: Blocks that were looked for, and how many were stored; None: never asked, or no answer.
    num_looked_up: int | None = None
    num_stored: int | None = None
    lookup_reason: str = ""
    lookup_sent_ns: int | None = None
    lookup_answered_ns: int | None = None
    #: The first block (from 1) that the store lacked, and the ranks whose part was missing.
    missing_block: int = 0
    missing_ranks: list[int] = field(default_factory=list)
    #: The last answer to vLLM that was not "ask again".
    matched_tokens: int | None = None
    match_reason: str = ""
    matched_ns: int | None = None
    asynchronous: bool = False
    #: What vLLM made room for.
    external_tokens: int = 0
    jobs: dict[int, JobFacts] = field(default_factory=dict)
    finished: bool = False
    lost: list[str] = field(default_factory=list)
    #: Likewise, what daemons lost of the request's engine.
    peers_lost: list[str] = field(default_factory=list)
    #: Ranks whose daemon was lost while a load was open.
    lost_ranks: list[int] = field(default_factory=list)
    #: How daemons were lost while any job of the request was open, by rank.
    daemon_ends: dict[int, str] = field(default_factory=dict)
    num_preempted: int = 0
    #: Ranks whose daemon did not serve when vLLM was told that nothing is to be loaded.
    away: list[int] = field(default_factory=list)
    #: The scheduler side was lost while the request lived.
    engine_lost: bool = False
    #: The newest lookup reached no store.
    store_silent: bool = False

    @property
    def outcome(self) -> str:
        """``failed-load``, ``lost-load``, ``open-load``, ``hit``, ``unused-hit``, ``miss``,
        ``unanswered`` or ``unknown``.
        """
        loads = [job for job in self.jobs.values() if job.is_load]
        if any(job.ended(msg.JobOutcome.FAILED, msg.JobOutcome.CANCELLED) for job in loads):
            return "failed-load"
        if any(set(self.lost_ranks) - job.ends.keys() for job in loads):
            return "lost-load"
        if loads:
            return "hit" if all(job.is_over for job in loads) else "open-load"
        if self.matched_tokens is None:
            return "unanswered" if self.num_looked_up is not None else "unknown"
        return "unused-hit" if self.matched_tokens else "miss"

    @property
    def reason(self) -> str:
        """The word that explains the outcome; empty for a full hit."""
        if self.outcome == "failed-load":
            words = [word for job in self.jobs.values() if job.is_load for word in job.reasons]
            return words[0] if words else ""
        if self.outcome == "lost-load":
            return reasons.DAEMON_LOST
        return self.match_reason or self.lookup_reason


class Collector:
    """Reads a request's records in causal order."""

    def __init__(self, links: RequestLinks) -> None:
        """Start with nothing known; ``links`` reads the same records just before."""
        self._links = links
        self.facts = Facts(links.request_id)
        #: Keys that a daemon is looking for, by log and operation.
        self._asked: dict[tuple[str, int], tuple[str, ...]] = {}
        #: Blocks that the newest lookup found; None: it has no answer.
        self._stored: frozenset[bytes] | None = None
        self._planned_ns: dict[int, int] = {}
        #: Ranks whose daemon the engine is killing.
        self._fenced: set[int] = set()

    def add(self, entry: Entry, touch: Touch) -> None:
        """Take in the next record of the request."""
        if touch.event:
            self._event(entry)
        for command in touch.commands:
            self._command(entry, command)

    def _event(self, entry: Entry) -> None:
        facts, event = self.facts, entry.event
        if isinstance(event, (sched.RequestAdded, sched.MatchAsked)):
            facts.num_tokens = event.num_tokens
        elif isinstance(event, sched.BlocksAllocated):
            facts.external_tokens = max(facts.external_tokens, event.num_external_tokens)
        elif isinstance(event, sched.LookupAnswered):
            self._result(event.result, entry.at_ns)
        elif isinstance(event, sched.JobsReported):
            self._ends(event.rank, event.ends)
        elif isinstance(event, sched.RequestFinished):
            facts.finished = True
        elif isinstance(event, sched.StepFinished):
            for job_id in self._links.open_loads_of(event.invalid_block_ids):
                self._given_up(job_id, entry.at_ns)
        elif isinstance(event, sched.StepScheduled):
            facts.num_preempted += facts.request_id in event.preempted
        elif isinstance(event, work.SchedulerSaid):
            self._told(event.body, rank_of(event.engine))
        elif isinstance(event, work.KeysFound):
            self._found(self._asked.pop((entry.log, event.op), ()), event.outcomes)
        else:
            self._loss(event)

    def _given_up(self, job_id: int, at_ns: int) -> None:
        job = self.facts.jobs.get(job_id)
        if job is not None and not job.ends:
            job.given_up_ns = at_ns - self._planned_ns.get(job_id, at_ns)

    def _loss(self, event: object) -> None:
        """Note what was lost while the request lived."""
        facts = self.facts
        if isinstance(event, sched.DaemonLost):
            text = f"the daemon of rank {event.rank} was lost ({event.reason})"
            if event.rank in self._fenced:
                text = f"the silent daemon of rank {event.rank} was killed by the engine"
            facts.lost.append(text)
            open_jobs = [job for job in facts.jobs.values() if event.rank not in job.ends]
            for job in open_jobs:
                job.lost.append(event.rank)
                facts.daemon_ends[event.rank] = text
            if any(job.is_load for job in open_jobs):
                facts.lost_ranks.append(event.rank)
        elif isinstance(event, sched.FenceFailed):
            text = f"the silent daemon of rank {event.rank} could not be killed ({event.reason})"
            facts.lost.append(f"{text}, and its blocks stay reserved until it is heard of again")
        elif isinstance(event, sched.StoreChanged) and not event.up:
            facts.lost.append(f"the store went down ({event.reason})")
        elif isinstance(event, work.PeerLost):
            facts.peers_lost.append(f"{_side(event)} was lost ({event.reason})")
            facts.engine_lost |= event.role == "scheduler" and not facts.finished
            for job in facts.jobs.values():
                job.engine_lost |= not job.is_over

    def _command(self, entry: Entry, command: object) -> None:
        facts = self.facts
        if isinstance(command, sched_do.SendToDaemon):
            if isinstance(command.body, msg.Lookup):
                facts.lookup_sent_ns = entry.at_ns
            self._told(command.body, command.rank)
        elif isinstance(command, sched_do.HoldBlocks):
            self._planned_ns[command.job_id] = entry.at_ns
        elif isinstance(command, sched_do.AnswerMatch) and command.num_tokens is not None:
            facts.matched_tokens = command.num_tokens
            facts.match_reason = command.reason
            facts.asynchronous = command.asynchronous
            facts.matched_ns = entry.at_ns
            facts.away = sorted(self._links.around.away.get(entry.log, ()))
        elif isinstance(command, sched_do.FenceDaemon):
            self._fenced.add(command.rank)
        elif isinstance(command, work_do.FindKeys):
            self._asked[entry.log, command.op] = command.keys
        elif isinstance(command, work_do.SendToScheduler):
            if isinstance(command.body, msg.LookupResult):
                self._result(command.body, None)
            elif isinstance(command.body, msg.JobsEnded):
                self._ends(rank_of(command.engine), command.body.ends)

    def _told(self, body: object, rank: int) -> None:
        """A message that a daemon gets, seen at either end."""
        facts = self.facts
        if isinstance(body, msg.Lookup):
            facts.num_looked_up = sum(len(group.block_hashes) for group in body.groups)
        elif isinstance(body, msg.StepVerdict):
            for job_id in body.tainted:
                if job_id in facts.jobs:
                    facts.jobs[job_id].tainted = True
        elif isinstance(body, msg.StepPlan):
            for job in plan_jobs(body):
                if job.request_id == facts.request_id and job.job_id not in facts.jobs:
                    known = self._stored
                    facts.jobs[job.job_id] = JobFacts(
                        job.job_id,
                        body.step,
                        isinstance(job, msg.LoadJob),
                        isinstance(job, msg.LoadJob) and job.layerwise,
                        len(job.block_ids),
                        num_unknown=0 if known is None else len({*job.block_hashes} - known),
                    )
                if job.job_id in facts.jobs and rank not in facts.jobs[job.job_id].ranks:
                    facts.jobs[job.job_id].ranks.append(rank)

    def _found(self, keys: Sequence[str], outcomes: Sequence[Outcome]) -> None:
        """Note the first block that the store lacks, and for which ranks."""
        self.facts.store_silent = bool(outcomes) and set(outcomes) == {Outcome.DOWN}
        number, digest = 0, ""
        missing: list[int] = []
        for key, outcome in zip(keys, outcomes, strict=False):
            if key_hash(key) != digest:
                if missing:
                    break
                number, digest = number + 1, key_hash(key)
            if outcome is Outcome.MISS:
                missing.append(self._links.around.marks.get(key_mark(key), -1))
        if missing and -1 not in missing:
            self.facts.missing_block, self.facts.missing_ranks = number, missing

    def _result(self, result: msg.LookupResult, at_ns: int | None) -> None:
        self.facts.num_stored = sum(hit.num_blocks for hit in result.hits)
        lookup = self._links.lookups.get(result.lookup_id)
        if lookup is not None:
            hits = {hit.group: hit.num_blocks for hit in result.hits}
            self._stored = frozenset(
                block
                for group in lookup.groups
                for block in group.block_hashes[: hits.get(group.group, 0)]
            )
        self.facts.lookup_reason = result.reason
        self.facts.lookup_answered_ns = at_ns or self.facts.lookup_answered_ns

    def _ends(self, rank: int, ends: Sequence[msg.JobEnd]) -> None:
        for end in ends:
            if end.job_id in self.facts.jobs:
                self.facts.jobs[end.job_id].ends[rank] = end


def _side(event: work.PeerLost) -> str:
    return f"the {event.role} side of {engine_name(event.engine)}"
