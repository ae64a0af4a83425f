"""What decided a request's fate, from its records."""

from pathlib import Path

from kvcommon import messages as msg
from kvcommon import reasons
from kvreplay.facts import Facts, JobFacts
from kvreplay.story import tell
from kvsched.core import events as sched
from tests.kvreplay.pair import Pair


def job(*ends: tuple[int, msg.JobEnd]) -> JobFacts:
    found = JobFacts(1, 5, is_load=True, layerwise=True, num_blocks=4)
    found.ends.update(ends)
    return found


def test_a_job_knows_the_union_of_its_ranks() -> None:
    found = job(
        (0, msg.JobEnd(job_id=1, outcome=msg.JobOutcome.FAILED, failed_blocks=(7, 3), reason="a")),
        (1, msg.JobEnd(job_id=1, outcome=msg.JobOutcome.FAILED, failed_blocks=(3,), reason="b")),
    )
    assert found.failed_blocks == [3, 7]
    assert found.reasons == ["a", "b"]
    assert found.ended(msg.JobOutcome.FAILED)
    assert not found.ended(msg.JobOutcome.DONE, msg.JobOutcome.CANCELLED)


def test_outcomes() -> None:
    done = msg.JobEnd(job_id=1, outcome=msg.JobOutcome.DONE)
    failed = msg.JobEnd(job_id=1, outcome=msg.JobOutcome.FAILED, reason=reasons.EXPIRED)
    assert Facts("r").outcome == "unknown"
    assert Facts("r", num_looked_up=1).outcome == "unanswered"
    assert Facts("r", matched_tokens=0).outcome == "miss"
    assert Facts("r", matched_tokens=16).outcome == "unused-hit"
    assert Facts("r", jobs={1: job()}).outcome == "open-load"
    assert Facts("r", jobs={1: job()}, lost_ranks=[0]).outcome == "lost-load"
    assert Facts("r", jobs={1: job((0, done))}).outcome == "hit"
    spoilt = Facts("r", jobs={1: job((0, done), (1, failed))})
    assert (spoilt.outcome, spoilt.reason) == ("failed-load", reasons.EXPIRED)


def test_the_missing_part_is_named_by_block_and_rank(tmp_path: Path) -> None:
    pair = Pair(tmp_path, ranks=3)
    pair.put("a", 2)
    pair.put("a", 6, [1])
    pair.serve("req", 100, "a")
    facts = tell(pair.close(), "req").facts
    assert (facts.missing_block, facts.missing_ranks) == (3, [0, 2])
    assert (facts.num_looked_up, facts.num_stored) == (6, 2)


def test_a_daemon_lost_while_nothing_is_loaded_is_only_mentioned(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.add("req", 100, "a")
    pair.say(sched.DaemonLost, rank=0, dead=False, reason="silence")
    pair.ask("req", 100)
    pair.finish("req")
    facts = tell(pair.close(), "req").facts
    assert facts.lost_ranks == []
    assert facts.lost == ["the daemon of rank 0 was lost (silence)"]


def test_a_daemon_that_cannot_be_killed_is_mentioned(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.add("req", 100, "a")
    pair.say(sched.FenceFailed, rank=0, reason="another user's")
    pair.ask("req", 100)
    pair.finish("req")
    sentence = tell(pair.close(), "req").sentence
    assert "the silent daemon of rank 0 could not be killed (another user's)" in sentence
