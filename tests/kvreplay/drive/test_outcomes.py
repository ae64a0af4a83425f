"""Outcomes side by side."""

from pathlib import Path

from kvcommon import messages as msg
from kvreplay.drive.outcomes import MAX_LISTED, Item, Tally, describe, recorded
from tests.kvreplay import scenes


def test_what_messages_settle() -> None:
    hit = msg.LookupResult(lookup_id=4, hits=(msg.GroupHit(group=0, num_blocks=3),), reason="x")
    assert list(describe(hit)) == [("lookup", 4, "3 blocks (x)")]
    end = msg.JobEnd(
        job_id=9, outcome=msg.JobOutcome.FAILED, failed_blocks=(1, 2), reason="evicted"
    )
    assert list(describe(msg.JobsEnded(ends=(end,)))) == [
        ("job", 9, "failed, 2 blocks not (evicted)")
    ]
    assert list(describe(msg.PlanAck(step=5))) == [("plan", 5, "taken in")]
    assert list(describe(msg.Heartbeat())) == []


def test_a_recordings_answers(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    found = [pair for log in scene.close().logs for entry in log for pair in recorded(entry)]
    assert [(item.kind, item.number) for item, _ in found] == [
        ("lookup", 7), ("plan", 5), ("job", 11)
    ]  # fmt: skip
    assert str(found[2][0]) == "job 11 of eng-1#0"


def test_differences_are_in_recorded_order() -> None:
    items = [Item("job", "w", "e#0", number) for number in range(3)]
    tally = Tally(expected=dict.fromkeys(items, "done"))
    tally.found = {items[1]: "done", items[2]: "failed"}
    assert tally.num_same == 1
    assert tally.differences == [
        "job 0 of e#0: recorded done; now no answer",
        "job 2 of e#0: recorded done; now failed",
    ]


def test_faults_are_listed_up_to_a_bound_and_counted() -> None:
    tally = Tally()
    for number in range(MAX_LISTED + 7):
        tally.fault(str(number))
    assert (len(tally.faults), tally.num_faults) == (MAX_LISTED, MAX_LISTED + 7)
