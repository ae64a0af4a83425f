"""``report``: one HTML file that shows everything, needs no network, and runs nothing of the logs.

What stands in a log reaches the page as JSON data, and from there only as text.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from kvreplay.loading import LogSet
from kvreplay.requests import read_requests
from kvreplay.stats import Stats, gather
from kvreplay.story import Story
from kvreplay.trace import TraceEvent, trace_events
from kvreplay.verify import Result, Verdict, verify
from kvreplay.words import count, size

#: More would make a page that no browser likes; what is beyond is counted.
MAX_REQUESTS: Final = 2000
MAX_SLICES: Final = 40_000
MAX_LINES: Final = 250
_PAGE: Final = Path(__file__).with_name("page")


def make_report(logs: LogSet) -> str:
    """Return the page."""
    data = collect(logs)
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    # Inside a script element only "<" could end it.
    parts = {
        "/*STYLE*/": _read("page.css"),
        "/*SCRIPT*/": _read("page.js"),
        "/*DATA*/": text.replace("<", "\\u003c"),
    }
    page = _read("page.html")
    for mark, part in parts.items():
        before, _, after = page.partition(mark)
        page = before + part + after
    return page


def collect(logs: LogSet) -> dict[str, Any]:
    """Return what the page shows."""
    verdict = verify(logs)
    stats = gather(logs)
    every = read_requests(logs)
    stories = every[:MAX_REQUESTS]
    processes = [log.label for log in logs.logs]
    numbers = {story.request_id: number for number, story in enumerate(stories)}
    check, kind = _check(verdict)
    start_ns = stats.first_ns or 0
    return {
        "span": f"{(stats.last_ns - start_ns) / 1e9:.3f} s, {count(len(processes), 'log')}",
        "check": check,
        "check_kind": kind,
        "numbers": _numbers(stats, len(every) + every.num_left_out),
        "logs": list(_logs(logs, verdict)),
        "processes": processes,
        "requests": [_request(story, processes, start_ns) for story in stories],
        "requests_left_out": len(every) + every.num_left_out - len(stories),
        **_timeline(trace_events(logs), processes, numbers),
    }


def _read(name: str) -> str:
    return (_PAGE / name).read_text("utf-8")


def _check(verdict: Verdict) -> tuple[str, str]:
    broken = len(verdict.judgement.violations) + verdict.judgement.num_more
    different = sum(one.result is Result.DIFFERENT for one in verdict.replays)
    if verdict.status == 1:
        texts = [f"{count(broken, 'rule violation')}"] if broken else []
        texts += [f"{count(different, 'log')} replayed differently"] if different else []
        return "Check failed: " + ", ".join(texts), "bad"
    if verdict.status == 2:
        return "Nothing wrong found, but not everything could be checked", "warn"
    return "Checked: every command comes again, no rule is broken", "good"


def _numbers(stats: Stats, num_requests: int) -> list[tuple[str, str]]:
    total = sum(stats.answers.values())
    load = stats.phases.get("load job")
    return [
        ("Requests", str(num_requests)),
        ("Hits", f"{stats.answers['hit']} of {total}" if total else "none"),
        ("Tokens to be loaded", str(stats.external_tokens)),
        ("Loaded", size(stats.loaded_bytes)),
        ("Saved", size(stats.saved_bytes)),
        ("Load, p50", f"{load.quantile_ns(0.5) / 1e6:.3f} ms" if load else "none"),
        ("Load, p95", f"{load.quantile_ns(0.95) / 1e6:.3f} ms" if load else "none"),
        ("Records", str(sum(stats.num_records.values()))),
    ]


def _logs(logs: LogSet, verdict: Verdict) -> Iterable[tuple[str, str]]:
    for one in verdict.replays:
        kind = {"same": "good", "different": "bad"}.get(one.result.value, "warn")
        why = f": {one.why}" if one.why else ""
        yield f"{one.log}: {one.result.value}, {one.num_records} records replayed{why}", kind
    for broken in verdict.judgement.violations:
        yield f"{broken.log}:{broken.seq}: rule {broken.rule} is broken: {broken.text}", "bad"
    for still in verdict.judgement.open[:50]:
        yield still.sentence, ""
    for log in logs.logs:
        for text in log.problems:
            yield f"{log.label}: {text}", "warn"
    for text in logs.unreadable:
        yield text, "warn"


def _request(story: Story, processes: list[str], start_ns: int) -> dict[str, Any]:
    facts = story.facts
    loads = [end for job in facts.jobs.values() if job.is_load for end in job.ends.values()]
    loaded = sum(end.num_bytes for end in loads)
    return {
        "id": story.request_id,
        "at_us": max(0, story.start_ns - start_ns) // 1000,
        "tokens": facts.num_tokens,
        "outcome": facts.outcome,
        "reason": facts.reason,
        "sentence": story.sentence,
        "loaded": size(loaded) if loaded else "",
        "left_out": story.num_left_out + max(0, len(story.lines) - MAX_LINES),
        "lines": [
            (
                line.offset_ns // 1000,
                processes.index(line.process),
                line.seq,
                int(line.what == "event"),
                line.text,
                line.cause,
            )
            for line in story.lines[:MAX_LINES]
        ],
    }


def _timeline(
    events: Iterable[TraceEvent], processes: list[str], numbers: dict[str, int]
) -> dict[str, Any]:
    """Turn the trace's events into rows of the page's timeline."""
    names: dict[tuple[int, int], str] = {}
    slices: list[tuple[tuple[int, int], int, int, str, str, list[int]]] = []
    marks: list[tuple[tuple[int, int], int, str]] = []
    num_left_out, until_us = 0, 0
    for event in events:
        place = (_int(event, "pid"), _int(event, "tid"))
        args: dict[str, Any] = event.get("args", {})  # type: ignore[assignment]
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[place] = str(args["name"])
        elif event["ph"] == "X" and len(slices) < MAX_SLICES:
            is_request = event.get("cat") == "request"
            found = str(event["name"] if is_request else args.get("requests", "")).split(", ")
            requests = [numbers[one] for one in found if one in numbers]
            texts = (str(args.get("what", event["name"])), str(args.get("result", "")))
            text = " → ".join(filter(None, texts))
            kind = str(event["name"]).partition(" ")[0]
            if is_request and requests:
                kind = "request"
            slices.append((place, _int(event, "ts"), _int(event, "dur"), kind, text, requests))
        elif event["ph"] == "i" and len(marks) < MAX_SLICES:
            marks.append((place, _int(event, "ts"), str(event["name"])))
        elif event["ph"] in {"X", "i"}:
            until_us = until_us if num_left_out else _int(event, "ts")
            num_left_out += 1
    # Requests first; they are the last process of the trace.
    titles = ["requests", *processes]
    places = {place: (place[0] % len(titles), _in_order(names[place]), place[1]) for place in names}
    order = sorted(names, key=places.__getitem__)
    tracks: list[tuple[int, str, int]] = []
    number_of: dict[tuple[int, int], int] = {}
    last = -1
    for place in order:
        process = places[place][0]
        if process != last:
            # A line with the name of the process alone.
            last = process
            tracks.append((process, titles[process], 1))
        number_of[place] = len(tracks)
        tracks.append((process, names[place], 0))
    kinds = sorted({one[3] for one in slices})
    return {
        "tracks": tracks,
        "kinds": kinds,
        "slices": [
            (number_of[place], start, length, kinds.index(kind), text, requests)
            for place, start, length, kind, text, requests in slices
            if place in number_of
        ],
        "marks": [(number_of[place], at, text) for place, at, text in marks if place in number_of],
        "slices_left_out": num_left_out,
        #: From about here on they are left out.
        "slices_until_us": until_us,
    }


def _in_order(name: str) -> str:
    """As what a track is put in order: lane 10 behind lane 9."""
    return re.sub(r"\d+", lambda found: found[0].zfill(9), name)


def _int(event: TraceEvent, name: str) -> int:
    value = event.get(name, 0)
    return round(value) if isinstance(value, (int, float)) else 0
