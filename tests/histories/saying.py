"""What a history says: what ``expected.json`` beside it holds."""

from pathlib import Path

from kvreplay.loading import open_logs
from kvreplay.requests import read_requests
from kvreplay.verify import verify


def says(directory: Path) -> dict[str, object]:
    """What a history says: the check's status, broken rules, and every request's fate."""
    logs = open_logs([directory])
    verdict = verify(logs)
    return {
        "status": verdict.status,
        "rules": sorted({one.rule for one in verdict.judgement.violations}),
        "requests": {
            story.request_id: [story.facts.outcome, story.facts.reason]
            for story in read_requests(logs)
        },
    }


def tells(directory: Path) -> list[str]:
    """Every request's sentence, and what was open at the end."""
    logs = open_logs([directory])
    sentences = [story.sentence for story in read_requests(logs)]
    return [*sentences, *(one.sentence for one in verify(logs).judgement.open)]
