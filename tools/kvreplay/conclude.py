"""Gathers what decided a request's fate and says it in one sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvcommon import messages as msg
from kvcommon import reasons
from kvreplay.links import RequestLinks, Touch
from kvreplay.loading import Entry
from kvreplay.ops import plan_jobs, rank_of
from kvreplay.words import blocks, count, engine_name, millis, size, spans
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work

_MISSES: Final[dict[str, str]] = {
    reasons.NOT_STORED: "the store does not hold the next block of its prefix for every rank",
    reasons.EVICTED: "the store has evicted a block that it held before",
    reasons.LOOKUP_TIMEOUT: "the lookup was not answered before its deadline",
    reasons.STORE_DOWN: "the store is down and its breaker open",
    reasons.DAEMON_LOST: "the daemon of a rank was lost",
    reasons.DAEMON_NOT_ATTACHED: "the daemon of a rank was not attached",
    reasons.NOT_WORTH_LOADING: "the hit was too short to be worth loading",
    reasons.ROLE: "its role or configuration forbids loading",
    reasons.TOO_SHORT: "it has no full block to load",
    reasons.ALREADY_LOCAL: "vLLM already held on the device all that is stored",
    reasons.LOAD_FAILED_BEFORE: "a load of it had failed before",
    reasons.OVERLOAD: "a bound was reached",
    reasons.LATE: "the answer came too late",
}


@dataclass
class JobFacts:
    """One job of the request."""

    job_id: int
    step: int
    is_load: bool
    layerwise: bool
    num_blocks: int
    tainted: bool = False
    #: Ends by rank.
    ends: dict[int, msg.JobEnd] = field(default_factory=dict)

    @property
    def failed_blocks(self) -> list[int]:
        """Blocks that failed on any rank."""
        return sorted({block for end in self.ends.values() for block in end.failed_blocks})

    @property
    def reasons(self) -> list[str]:
        """Every reason word, once."""
        return sorted({end.reason for end in self.ends.values() if end.reason})

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

    @property
    def outcome(self) -> str:
        """``failed-load``, ``open-load``, ``hit``, ``miss``, ``unanswered`` or ``unknown``."""
        loads = [job for job in self.jobs.values() if job.is_load]
        if any(job.ended(msg.JobOutcome.FAILED, msg.JobOutcome.CANCELLED) for job in loads):
            return "failed-load"
        if loads:
            return "hit" if all(job.ends for job in loads) else "open-load"
        if self.matched_tokens is None:
            return "unanswered" if self.num_looked_up is not None else "unknown"
        return "unused-hit" if self.matched_tokens else "miss"

    @property
    def reason(self) -> str:
        """The word that explains the outcome; empty for a full hit."""
        if self.outcome == "failed-load":
            words = [word for job in self.jobs.values() if job.is_load for word in job.reasons]
            return words[0] if words else ""
        return self.match_reason or self.lookup_reason


class Collector:
    """Reads a request's records in causal order."""

    def __init__(self, links: RequestLinks) -> None:
        """Start with nothing known; ``links`` reads the same records just before."""
        self._links = links
        self.facts = Facts(links.request_id)

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
        elif isinstance(event, sched.DaemonLost):
            facts.lost.append(f"the daemon of rank {event.rank} was lost ({event.reason})")
        elif isinstance(event, sched.StoreChanged) and not event.up:
            facts.lost.append(f"the store went down ({event.reason})")
        elif isinstance(event, work.PeerLost):
            facts.lost.append(f"{_side(event)} was lost ({event.reason})")
        elif isinstance(event, work.SchedulerSaid):
            self._told(event.body)

    def _command(self, entry: Entry, command: object) -> None:
        facts = self.facts
        if isinstance(command, sched_do.SendToDaemon):
            if isinstance(command.body, msg.Lookup):
                facts.lookup_sent_ns = entry.at_ns
            self._told(command.body)
        elif isinstance(command, sched_do.AnswerMatch) and command.num_tokens is not None:
            facts.matched_tokens = command.num_tokens
            facts.match_reason = command.reason
            facts.asynchronous = command.asynchronous
            facts.matched_ns = entry.at_ns
        elif isinstance(command, work_do.SendToScheduler):
            if isinstance(command.body, msg.LookupResult):
                self._result(command.body, None)
            elif isinstance(command.body, msg.JobsEnded):
                self._ends(rank_of(command.engine), command.body.ends)

    def _told(self, body: object) -> None:
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
                    facts.jobs[job.job_id] = JobFacts(
                        job.job_id,
                        body.step,
                        isinstance(job, msg.LoadJob),
                        isinstance(job, msg.LoadJob) and job.layerwise,
                        len(job.block_ids),
                    )

    def _result(self, result: msg.LookupResult, at_ns: int | None) -> None:
        self.facts.num_stored = sum(hit.num_blocks for hit in result.hits)
        self.facts.lookup_reason = result.reason
        self.facts.lookup_answered_ns = at_ns or self.facts.lookup_answered_ns

    def _ends(self, rank: int, ends: Sequence[msg.JobEnd]) -> None:
        for end in ends:
            if end.job_id in self.facts.jobs:
                self.facts.jobs[end.job_id].ends[rank] = end


def sentence(facts: Facts) -> str:
    """Say in one sentence why the request went as it did."""
    parts = [_load_clause(facts), *_save_clauses(facts)]
    if facts.lost:
        parts.append("meanwhile " + " and ".join(dict.fromkeys(facts.lost)))
    text = "; ".join(part for part in parts if part)
    return f"Request {facts.request_id} {text}."


def _side(event: work.PeerLost) -> str:
    return f"the {event.role} side of {engine_name(event.engine)}"


def _load_clause(facts: Facts) -> str:
    how: dict[str, Callable[[Facts], str]] = {
        "failed-load": _failed,
        "hit": _hit,
        "open-load": _hit,
        "miss": _miss,
        "unused-hit": lambda one: (
            f"was offered {count(one.matched_tokens or 0, 'token')} from the store, but vLLM did "
            "not use them"
        ),
        "unanswered": lambda _: (
            "took nothing from the store: its lookup had no answer when the log ended or the "
            "request did"
        ),
        "unknown": lambda _: "was never looked up as far as these logs show",
    }
    return how[facts.outcome](facts)


def _hit(facts: Facts) -> str:
    loads = [job for job in facts.jobs.values() if job.is_load]
    how = "layerwise" if loads[0].layerwise else "asynchronously"
    num_blocks = sum(job.num_blocks for job in loads)
    moved = sum(end.num_bytes for job in loads for end in job.ends.values())
    slowest = max((end.duration_us for job in loads for end in job.ends.values()), default=0)
    what = f"{count(num_blocks, 'block')}"
    if facts.external_tokens:
        what = f"{count(facts.external_tokens, 'token')} ({what})"
    if facts.outcome == "open-load":
        return f"is taking {what} from the store {how}; the load has not ended in these logs"
    text = f"took {what} from the store {how}"
    if moved:
        text += f", {size(moved)} in {slowest / 1000:.3f} ms"
    if facts.lookup_reason and facts.num_looked_up is not None:
        text += (
            f"; of {count(facts.num_looked_up, 'block')} looked up {facts.num_stored or 0} "
            f"were a hit ({facts.lookup_reason})"
        )
    return text


def _failed(facts: Facts) -> str:
    loads = [job for job in facts.jobs.values() if job.is_load]
    failed = sorted({block for job in loads for block in job.failed_blocks})
    ranks = sorted(
        {
            rank
            for job in loads
            for rank, end in job.ends.items()
            if end.outcome in (msg.JobOutcome.FAILED, msg.JobOutcome.CANCELLED)
        }
    )
    promised = facts.external_tokens or facts.matched_tokens or 0
    words = sorted({word for job in loads for word in job.reasons})
    how = "layerwise" if loads[0].layerwise else "asynchronous"
    what = f"of {blocks(failed)} failed" if failed else "was cancelled"
    return (
        f"was to take {count(promised, 'token')} from the store, but the {how} load "
        f"{what} on rank {spans(ranks)} ({', '.join(words) or 'no reason given'}), "
        "so vLLM has to compute them"
    )


def _miss(facts: Facts) -> str:
    word = facts.reason
    why = _MISSES.get(word, "no reason was recorded")
    if word == reasons.NOT_STORED and facts.num_stored is not None:
        why = f"block {facts.num_stored + 1} of its prefix is not in the store for every rank"
    text = f"took nothing from the store because {why} ({word or 'no reason'}"
    if facts.num_looked_up is not None:
        text += f"; {count(facts.num_looked_up, 'block')} looked up"
        text += "" if facts.num_stored is None else f", {facts.num_stored} stored"
    sent, answered, told = facts.lookup_sent_ns, facts.lookup_answered_ns, facts.matched_ns
    if word == reasons.LOOKUP_TIMEOUT and sent is not None:
        if answered is not None:
            text += f"; the answer came {millis(answered - sent)} after it was asked"
        elif told is not None:
            text += f"; given up after {millis(told - sent)}, never answered"
    return text + ")"


def _save_clauses(facts: Facts) -> list[str]:
    saves = [job for job in facts.jobs.values() if not job.is_load]
    done = [job for job in saves if job.ended(msg.JobOutcome.DONE) and not job.tainted]
    parts = []
    if done:
        saved = sum(job.num_blocks - len(job.failed_blocks) for job in done)
        parts.append(f"saved {count(saved, 'block')} in {_steps(done)}")
    skipped = [job for job in saves if job.ended(msg.JobOutcome.SKIPPED)]
    if skipped:
        number = count(sum(job.num_blocks for job in skipped), "block")
        parts.append(f"did not need to save {number} in {_steps(skipped)} ({_words(skipped)})")
    tainted = [job for job in saves if job.tainted]
    if tainted:
        number = count(sum(job.num_blocks for job in tainted), "block")
        parts.append(
            f"its save of {number} in {_steps(tainted)} was revoked, because a load of that step "
            f"had failed and the blocks would be wrong ({reasons.TAINTED})"
        )
    bad = (msg.JobOutcome.FAILED, msg.JobOutcome.CANCELLED)
    failed = [job for job in saves if job.ended(*bad) and not job.tainted]
    if failed:
        number = count(sum(len(job.failed_blocks) or job.num_blocks for job in failed), "block")
        parts.append(f"could not save {number} in {_steps(failed)} ({_words(failed)})")
    still = [job for job in saves if not job.ends]
    if still:
        parts.append(f"{count(len(still), 'save')} had not ended when the logs did")
    return parts


def _steps(jobs: Sequence[JobFacts]) -> str:
    steps = sorted({job.step for job in jobs})
    return f"{'step' if len(steps) == 1 else 'steps'} {spans(steps)}"


def _words(jobs: Sequence[JobFacts]) -> str:
    return ", ".join(sorted({word for job in jobs for word in job.reasons})) or "no reason given"
