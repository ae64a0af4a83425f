"""Says in one sentence why a request went as it did."""

from collections.abc import Callable, Sequence
from typing import Final

from kvcommon import messages as msg
from kvcommon import reasons
from kvreplay.facts import Facts, JobFacts
from kvreplay.words import blocks, count, millis, on_ranks, size, spans

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


_FAILURES: Final[dict[str, str]] = {
    reasons.EVICTED: "the store no longer had what the lookup had found",
    reasons.EXPIRED: "the store's lease ran out before the bytes were there",
    reasons.TRANSFER_FAILED: "the transfer failed",
    reasons.STORE_DOWN: "the store went down",
    reasons.DAEMON_LOST: "the daemon was lost",
    reasons.DAEMON_NOT_ATTACHED: "the daemon was not attached",
    reasons.ENGINE_LOST: "the daemon lost the engine",
    reasons.OVERLOAD: "a bound was reached",
    reasons.LATE: "it came too late",
    reasons.BAD_PLAN: "the plan named what the rank does not have",
}


def sentence(facts: Facts) -> str:
    """Say in one sentence why the request went as it did."""
    parts = [_load_clause(facts), *_save_clauses(facts)]
    if facts.num_preempted:
        often = "once" if facts.num_preempted == 1 else f"{facts.num_preempted} times"
        parts.append(f"was preempted {often}, because vLLM had no free blocks")
    told = {_end_of(facts, rank) for job in facts.jobs.values() for rank in job.lost_ranks}
    lost = [text for text in dict.fromkeys(facts.lost) if text not in told]
    if facts.engine_lost:
        parts.append(f"its engine was lost before it had finished: first, {facts.peers_lost[0]}")
    else:
        lost += dict.fromkeys(facts.peers_lost)
    if lost:
        parts.append("meanwhile " + " and ".join(lost))
    text = "; ".join(part for part in parts if part)
    return f"Request {facts.request_id} {text}."


def _load_clause(facts: Facts) -> str:
    how: dict[str, Callable[[Facts], str]] = {
        "failed-load": _failed,
        "lost-load": _lost,
        "hit": _hit,
        "open-load": _hit,
        "miss": _miss,
        "unused-hit": lambda one: (
            f"was offered {count(one.matched_tokens or 0, 'token')} from the store, but vLLM did "
            "not use them"
        ),
        "unanswered": _unanswered,
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
        if any(job.engine_lost for job in loads):
            return (
                f"was taking {what} from the store {how} when its engine was lost "
                f"({reasons.ENGINE_LOST})"
            )
        return f"is taking {what} from the store {how}; the load has not ended in these logs"
    text = f"took {what} from the store {how}"
    if moved:
        text += f", {size(moved)} in {slowest / 1000:.3f} ms"
    if facts.lookup_reason and facts.num_looked_up is not None:
        text += (
            f"; of {count(facts.num_looked_up, 'block')} looked up {facts.num_stored or 0} "
            f"were a hit ({facts.lookup_reason}"
        )
        if facts.missing_block:
            text += f": block {facts.missing_block} is missing on {on_ranks(facts.missing_ranks)}"
        text += ")"
    return text


def _lost(facts: Facts) -> str:
    loads = [job for job in facts.jobs.values() if job.is_load]
    promised = facts.external_tokens or facts.matched_tokens or 0
    how = "layerwise" if loads[0].layerwise else "asynchronous"
    return (
        f"was to take {count(promised, 'token')} from the store, but {_ends_of(facts, loads)} in "
        f"the middle of the {how} load of {count(sum(job.num_blocks for job in loads), 'block')} "
        f"({reasons.DAEMON_LOST}), so vLLM has to compute them"
    )


def _ends_of(facts: Facts, jobs: Sequence[JobFacts]) -> str:
    """Say how the daemons were lost that had not ended these jobs."""
    ranks = sorted({rank for job in jobs for rank in job.lost_ranks} or set(facts.lost_ranks))
    return " and ".join(_end_of(facts, rank) for rank in ranks)


def _end_of(facts: Facts, rank: int) -> str:
    return facts.daemon_ends.get(rank, f"the daemon of rank {rank} was lost")


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
    text = f"was to take {count(promised, 'token')} from the store, but the {how} load "
    if words == [reasons.CANCELLED]:
        given_up = f"of {blocks(failed)} " if failed else ""
        why = "because the request had ended" if facts.finished else "before it was complete"
        return f"{text}{given_up}was given up on {on_ranks(ranks)} {why} ({words[0]})"
    if words == [reasons.LATE] and any(job.given_up_ns for job in loads):
        after = millis(max(job.given_up_ns for job in loads))
        num_blocks = count(sum(job.num_blocks for job in loads), "block")
        return (
            f"{text}of {num_blocks} was given up after {after}, when {on_ranks(ranks)} had not "
            f"answered in time ({reasons.LATE}), so vLLM has to compute them"
        )
    text += f"of {blocks(failed)} failed" if failed else "was cancelled"
    text += f" on {on_ranks(ranks)}"
    whys = [_FAILURES[word] for word in words if word in _FAILURES]
    text += f" because {' and '.join(whys)}" if whys else ""
    return f"{text} ({', '.join(words) or 'no reason given'}), so vLLM has to compute them"


def _unanswered(facts: Facts) -> str:
    """Nothing was told to vLLM yet: it did not ask, or was told to ask again."""
    text = "took nothing from the store: "
    if facts.num_stored is None:
        if facts.finished:
            return f"{text}it ended before its lookup was answered"
        return f"{text}its lookup had no answer when the logs ended"
    found = f"{facts.num_stored} of {count(facts.num_looked_up or 0, 'block')} were stored"
    if facts.finished:
        return f"{text}it ended before vLLM had the answer ({found})"
    return f"{text}vLLM had not asked for the answer when the logs ended ({found})"


def _miss(facts: Facts) -> str:
    word = facts.reason
    why = _MISSES.get(word, "no reason was recorded")
    if word == reasons.NOT_STORED and facts.num_stored is not None:
        why = f"block {facts.num_stored + 1} of its prefix is not in the store for every rank"
    if word == reasons.NOT_STORED and facts.missing_block:
        why = f"block {facts.missing_block} of its prefix is not in the store for "
        why += on_ranks(facts.missing_ranks)
    if word == reasons.STORE_DOWN and facts.store_silent:
        why = "the store did not answer the lookup"
    if word in (reasons.DAEMON_LOST, reasons.DAEMON_NOT_ATTACHED) and facts.away:
        why = f"the daemon of {on_ranks(facts.away)} was "
        why += "lost" if word == reasons.DAEMON_LOST else "not attached"
    text = f"took nothing from the store because {why} ({word or 'no reason'}"
    if facts.num_looked_up is not None:
        text += f"; {count(facts.num_looked_up, 'block')} looked up"
        known = facts.num_stored is not None and word != reasons.STORE_DOWN
        text += f", {facts.num_stored} stored" if known else ""
    sent, answered, told = facts.lookup_sent_ns, facts.lookup_answered_ns, facts.matched_ns
    if word == reasons.LOOKUP_TIMEOUT and sent is not None:
        if answered is not None:
            text += f"; the answer came {millis(answered - sent)} after it was asked"
        elif told is not None:
            text += f"; given up after {millis(told - sent)}, never answered"
    return text + ")"


def _save_clauses(facts: Facts) -> list[str]:
    saves = [job for job in facts.jobs.values() if not job.is_load]
    dropped = [job for job in saves if job.lost_ranks]
    whole = [job for job in saves if not job.lost_ranks]
    done = [
        job for job in whole if job.is_over and job.ended(msg.JobOutcome.DONE) and not job.tainted
    ]
    parts = []
    if done:
        saved = sum(job.num_blocks - len(job.failed_blocks) for job in done)
        parts.append(f"saved {count(saved, 'block')} in {_steps(done)}")
    skipped = [job for job in whole if job.ended(msg.JobOutcome.SKIPPED)]
    stored = [job for job in skipped if not job.num_unknown]
    if stored:
        number = count(sum(job.num_blocks for job in stored), "block")
        parts.append(f"did not need to save {number} in {_steps(stored)} ({_words(stored)})")
    taken = [job for job in skipped if job.num_unknown]
    if taken:
        number = count(sum(job.num_blocks for job in taken), "block")
        parts.append(
            f"did not save {number} in {_steps(taken)}, because somebody else had stored them "
            f"since the lookup or held their keys, as a dead writer does for a while "
            f"({_words(taken)})"
        )
    if dropped:
        number = count(sum(job.num_blocks for job in dropped), "block")
        parts.append(
            f"its save of {number} in {_steps(dropped)} was dropped, because "
            f"{_ends_of(facts, dropped)} ({reasons.DAEMON_LOST})"
        )
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
    orphans = [job for job in whole if not job.is_over and job.engine_lost]
    if orphans:
        number = count(sum(job.num_blocks for job in orphans), "block")
        text = f"its save of {number} in {_steps(orphans)} was dropped with the engine"
        parts.append(f"{text} ({reasons.ENGINE_LOST})")
    still = [job for job in whole if not (job.is_over or job.engine_lost)]
    if still:
        parts.append(f"{count(len(still), 'save')} had not ended when the logs did")
    return parts


def _steps(jobs: Sequence[JobFacts]) -> str:
    steps = sorted({job.step for job in jobs})
    return f"{'step' if len(steps) == 1 else 'steps'} {spans(steps)}"


def _words(jobs: Sequence[JobFacts]) -> str:
    return ", ".join(sorted({word for job in jobs for word in job.reasons})) or "no reason given"
