"""Runs every rule over merged logs, and says what was broken and what was left open."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvreplay.block_rules import BlocksAsPlanned, HitsComplete, PublishedComplete
from kvreplay.fates import Fates
from kvreplay.links import Mentions
from kvreplay.loading import Log
from kvreplay.merge import merge
from kvreplay.plan_rules import LoadsAsFound, PlansAsGiven, ReleasedLeftAlone
from kvreplay.rules import (
    FreeAfterEnds,
    JobsEndOnce,
    LoadsWaitForGate,
    NothingTaintedPublished,
    Open,
    OpsEndOnce,
    Rule,
)


@dataclass(frozen=True)
class Violation:
    """A rule that was broken, where, and by what."""

    rule: str
    log: str
    seq: int
    text: str
    #: A request that it is about; empty if none is known.
    request: str = ""


ALL_RULES: tuple[type[Rule], ...] = (
    OpsEndOnce,
    JobsEndOnce,
    FreeAfterEnds,
    NothingTaintedPublished,
    LoadsWaitForGate,
    BlocksAsPlanned,
    HitsComplete,
    PublishedComplete,
    PlansAsGiven,
    LoadsAsFound,
    ReleasedLeftAlone,
)


@dataclass(frozen=True)
class Judgement:
    """What the rules say about a set of logs."""

    violations: list[Violation]
    #: Violations beyond those listed.
    num_more: int
    open: list[Open]


def check_rules(
    logs: Sequence[Log],
    whole: frozenset[str],
    *,
    rules: Sequence[type[Rule]] = ALL_RULES,
    max_violations: int = 50,
) -> Judgement:
    """Check the rules over merged logs.

    Args:
        logs: the logs.
        whole: labels of those that begin at their start and have no gaps; only there does the
            absence of a record prove anything.
        rules: what to check.
        max_violations: list so many.
    """
    checks = [rule(whole) for rule in rules]
    mentions = Mentions()
    fates = Fates(logs)
    violations: list[Violation] = []
    num_more = 0
    for entry in merge(logs):
        requests = mentions.of(entry)
        fates.add(entry)
        for rule in checks:
            for text, job_id in rule.check(entry):
                if len(violations) >= max_violations:
                    num_more += 1
                    continue
                request = "" if job_id is None else mentions.job(job_id, requests)
                request = request or min(requests, default="")
                violations.append(Violation(rule.name, entry.log, entry.seq, text, request))
    still = [
        replace(one, fate=fates.of(one.log, one.engine, one.job_id))
        for rule in checks
        for one in rule.open()
    ]
    return Judgement(violations, num_more, still)
