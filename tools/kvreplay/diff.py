"""``diff``: where two runs first part, and how their numbers differ.

Two runs of the same work have other times, epochs and operation numbers. So they are compared
request by request, in the order of their arrival: by what decided its fate, and then by the kinds
of its records.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest

from kvreplay.facts import Facts
from kvreplay.loading import LogSet
from kvreplay.ops import OWN_REQUEST
from kvreplay.requests import read_requests
from kvreplay.stats import Stats, gather
from kvreplay.story import Line, Story
from kvreplay.words import size


@dataclass(frozen=True)
class Divergence:
    """The first request that went another way."""

    #: Position in the order of arrival, from 1.
    number: int
    request_a: str
    request_b: str
    #: What is different, in words, first things first.
    what: list[str]
    sentence_a: str
    sentence_b: str
    #: Records at which the stories part; empty: one is not in the other run at all.
    record_a: str = ""
    record_b: str = ""


@dataclass(frozen=True)
class Row:
    """One number of both runs."""

    name: str
    a: float
    b: float
    #: As printed.
    text_a: str
    text_b: str

    @property
    def change(self) -> float | None:
        """Relative change; None if there is nothing to relate it to."""
        return None if self.a == 0 else (self.b - self.a) / self.a


@dataclass(frozen=True)
class Diff:
    """Everything that ``diff`` prints."""

    num_a: int
    num_b: int
    num_different: int
    first: Divergence | None
    rows: list[Row] = field(default_factory=list)
    #: Requests of each run beyond the bound, which were not compared.
    left_out: tuple[int, int] = (0, 0)

    @property
    def status(self) -> int:
        """0: every request went the same way; 1: not."""
        return 1 if self.first else 0

    def plain(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "status": self.status,
            "requests": [self.num_a, self.num_b],
            "left_out": list(self.left_out),
            "different": self.num_different,
            "first": asdict(self.first) if self.first else None,
            "numbers": [{**asdict(row), "change": row.change} for row in self.rows],
        }


def compare(logs_a: LogSet, logs_b: LogSet) -> Diff:
    """Compare two runs."""
    every_a, every_b = read_requests(logs_a), read_requests(logs_b)
    stories_a, stories_b = _asked_for(every_a), _asked_for(every_b)
    first: Divergence | None = None
    num_different = 0
    for number, (one, other) in enumerate(_pairs(stories_a, stories_b), start=1):
        what = differences(one, other)
        if what:
            num_different += 1
            first = first or _divergence(number, one, other, what)
    return Diff(
        len(stories_a),
        len(stories_b),
        num_different,
        first,
        compare_stats(gather(logs_a), gather(logs_b)),
        (every_a.num_left_out, every_b.num_left_out),
    )


def differences(one: Story | None, other: Story | None) -> list[str]:
    """Say how two requests went differently; empty: they did not, as far as outcomes go."""
    if one is None or other is None:
        return ["the request is in one run only"]
    pairs = zip(_facts(one.facts), _facts(other.facts), strict=True)
    return [f"{name}: {a}, then {b}" for (name, a), (_, b) in pairs if a != b]


def compare_stats(a: Stats, b: Stats) -> list[Row]:
    """Put the numbers of two runs side by side."""
    rows = [
        _row("requests", a.num_requests, b.num_requests),
        _row("records", sum(a.num_records.values()), sum(b.num_records.values())),
        _row("answered with a hit", a.answers["hit"], b.answers["hit"]),
        _row("tokens to be loaded", a.external_tokens, b.external_tokens),
        Row("loaded", a.loaded_bytes, b.loaded_bytes, size(a.loaded_bytes), size(b.loaded_bytes)),
        Row("saved", a.saved_bytes, b.saved_bytes, size(a.saved_bytes), size(b.saved_bytes)),
        _row("faults of a core", a.faults, b.faults),
    ]
    reasons = sorted((set(a.answers) | set(b.answers)) - {"hit"})
    rows += [_row(f"not: {word}", a.answers[word], b.answers[word]) for word in reasons]
    rows += [
        _row(" ".join(filter(None, key)), a.jobs[key], b.jobs[key])
        for key in sorted(set(a.jobs) | set(b.jobs))
    ]
    for name in sorted(set(a.phases) & set(b.phases)):
        for share, label in ((0.5, "p50"), (0.95, "p95")):
            one, other = (stats.phases[name].quantile_ns(share) / 1e6 for stats in (a, b))
            rows.append(Row(f"{name} {label}", one, other, f"{one:.3f} ms", f"{other:.3f} ms"))
    return rows


def _asked_for(stories: Sequence[Story]) -> list[Story]:
    """Return what engines asked for; what ``run`` does on its own account is no part of it."""
    return [story for story in stories if story.request_id != OWN_REQUEST]


def _row(name: str, a: int, b: int) -> Row:
    return Row(name, a, b, str(a), str(b))


def _pairs(a: Sequence[Story], b: Sequence[Story]) -> list[tuple[Story | None, Story | None]]:
    """Match requests by id where both runs know it, else by the order of their arrival."""
    by_id = {story.request_id: story for story in b}
    known = [story for story in a if story.request_id in by_id]
    if known:
        pairs: list[tuple[Story | None, Story | None]] = [
            (story, by_id.pop(story.request_id, None)) for story in a
        ]
        return pairs + [(None, story) for story in by_id.values()]
    return list(zip_longest(a, b))


def _facts(facts: Facts) -> list[tuple[str, object]]:
    jobs = [
        (
            "load" if job.is_load else "save",
            job.num_blocks,
            sorted({end.outcome.value for end in job.ends.values()}),
            job.reasons,
            len(job.failed_blocks),
            job.tainted,
        )
        for job in facts.jobs.values()
    ]
    return [
        ("tokens", facts.num_tokens),
        ("blocks looked up", facts.num_looked_up),
        ("blocks stored", facts.num_stored),
        ("outcome", facts.outcome),
        ("reason", facts.reason),
        ("tokens answered", facts.matched_tokens),
        ("asynchronous", facts.asynchronous),
        ("tokens to be loaded", facts.external_tokens),
        ("loads", [job for job in jobs if job[0] == "load"]),
        ("saves", [job for job in jobs if job[0] == "save"]),
        ("lost", [*facts.lost, *facts.peers_lost]),
    ]


def _divergence(number: int, one: Story | None, other: Story | None, what: list[str]) -> Divergence:
    record_a, record_b = _parting(one.lines if one else [], other.lines if other else [])
    return Divergence(
        number=number,
        request_a=one.request_id if one else "",
        request_b=other.request_id if other else "",
        what=what,
        sentence_a=one.sentence if one else "",
        sentence_b=other.sentence if other else "",
        record_a=record_a,
        record_b=record_b,
    )


def _parting(a: Sequence[Line], b: Sequence[Line]) -> tuple[str, str]:
    """Name the records at which two stories are no longer of the same kinds."""
    for one, other in zip_longest(a, b):
        if one is None or other is None or one.kind != other.kind:
            return tuple(f"{line.process}:{line.seq}" if line else "" for line in (one, other))  # type: ignore[return-value]
    return "", ""
