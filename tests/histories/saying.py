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
