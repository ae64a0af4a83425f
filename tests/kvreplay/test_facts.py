"""What decided a request's fate, from its records."""

from pathlib import Path

from kvcommon import messages as msg
from kvcommon import reasons
from kvreplay.facts import Facts, JobFacts
from kvreplay.story import tell
from kvsched.core import commands as sched_do
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work
from kvworker.outcome import Outcome
from tests.kvreplay import scenes
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
    assert Facts("r", jobs={1: job((0, done))}, lost_ranks=[0]).outcome == "hit"
    # Half of a block is none.
    assert Facts("r", jobs={1: job((0, done))}, lost_ranks=[1]).outcome == "lost-load"
    spoilt = Facts("r", jobs={1: job((0, done), (1, failed))})
    assert (spoilt.outcome, spoilt.reason) == ("failed-load", reasons.EXPIRED)


def test_a_job_is_over_when_every_rank_has_ended_it() -> None:
    done = msg.JobEnd(job_id=1, outcome=msg.JobOutcome.DONE)
    half = job((0, done))
    half.ranks = [0, 1]
    assert not half.is_over
    assert Facts("r", jobs={1: half}).outcome == "open-load"
    half.ends[1] = done
    assert half.is_over


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


def test_a_save_that_its_daemon_did_not_survive_is_dropped(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    scenes.plan(scene, msg.StepPlan(step=6, saves=(scenes.save_job(),)))
    scene.sched(sched.DaemonLost(now_ns=scene.tick(), rank=0, dead=True, reason="killed"))
    told = tell(scene.close(), scenes.REQUEST)
    (save,) = told.facts.jobs.values()
    assert save.lost_ranks == [0]
    assert "its save of 1 block in step 6 was dropped, because the daemon of rank 0 was lost" in (
        told.sentence
    )
    assert told.sentence.count("was lost") == 1
    assert "not ended" not in told.sentence


def test_a_load_that_nobody_ends_in_time_is_late(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    scenes.answer_lookup(scene, 4)
    scenes.answer_match(scene, 64)
    scenes.plan(scene, msg.StepPlan(step=5, loads=(scenes.load_job(),)))
    scene.tick(800)
    ids = scenes.load_job().block_ids
    # An asynchronous load is told of in any later step.
    scene.sched(sched.StepFinished(now_ns=scene.tick(), step=8, invalid_block_ids=ids))
    end = msg.JobEnd(
        job_id=11, outcome=msg.JobOutcome.CANCELLED, failed_blocks=ids, reason=reasons.CANCELLED
    )
    scene.sched(sched.JobsReported(now_ns=scene.tick(), rank=0, ends=(end,)))
    told = tell(scene.close(), scenes.REQUEST)
    assert (told.facts.outcome, told.facts.reason) == ("failed-load", reasons.LATE)
    assert "was given up after 802.000 ms, when rank 0 had not answered in time (late)" in (
        told.sentence
    )


def test_a_load_that_its_daemon_fails_is_not_late(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.failed_load(scene)
    (load,) = tell(scene.close(), scenes.REQUEST).facts.jobs.values()
    assert load.given_up_ns == 0


def test_a_silent_daemon_is_killed_not_lost(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    scenes.plan(scene, msg.StepPlan(step=5, loads=(scenes.load_job(),)))
    scene.sched(
        sched.Ticked(now_ns=scene.tick(), silent_ms=((0, 2100),)), sched_do.FenceDaemon(rank=0)
    )
    scene.sched(sched.DaemonLost(now_ns=scene.tick(), rank=0, dead=True, reason="gone"))
    told = tell(scene.close(), scenes.REQUEST)
    assert told.facts.outcome == "lost-load"
    assert "FenceDaemon" in {line.kind for line in told.lines}
    assert "the silent daemon of rank 0 was killed by the engine in the middle" in told.sentence
    assert "was lost" not in told.sentence


def test_a_store_that_was_asked_and_one_that_was_not(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.answer = lambda _rank, command: (
        Outcome.DOWN if isinstance(command, (work_do.FindKeys, work_do.OpenPuts)) else None
    )
    for number in range(3):
        pair.serve(f"req-{number}", 33, "abc"[number], step=2 * number + 1)
    logs = pair.close()
    first, last = tell(logs, "req-0"), tell(logs, "req-2")
    assert (first.facts.store_silent, last.facts.store_silent) == (True, False)
    assert "the store did not answer the lookup (store-down; 2 blocks" in first.sentence
    assert "the store is down and its breaker open (store-down" in last.sentence
    assert "0 stored" not in first.sentence


def test_the_daemon_that_is_missing_is_named(tmp_path: Path) -> None:
    pair = Pair(tmp_path, ranks=3)
    pair.say(sched.DaemonLost, rank=1, dead=True, reason="killed")
    pair.pump()
    pair.dead = {1}
    pair.serve("req", 100, "a")
    told = tell(pair.close(), "req")
    assert told.facts.away == [1]
    assert "the daemon of rank 1 was lost (daemon-lost" in told.sentence


def test_a_preemption_is_told(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    scene.sched(
        sched.StepScheduled(now_ns=scene.tick(), step=3, preempted=(scenes.REQUEST, "another"))
    )
    told = tell(scene.close(), scenes.REQUEST)
    assert told.facts.num_preempted == 1
    assert "was preempted once" in told.sentence


def test_what_an_engine_leaves_behind_when_it_dies(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.add_request(scene)
    scenes.answer_lookup(scene, 4)
    scenes.answer_match(scene, 64)
    scenes.plan(scene, msg.StepPlan(step=5, loads=(scenes.load_job(),), saves=(scenes.save_job(),)))
    for role in ("model", "scheduler"):
        lost = work.PeerLost(
            now_ns=scene.tick(), engine=scenes.KEY, role=role, epoch=1, reason="its process ended"
        )
        scene.worker(lost)
    told = tell(scene.close(), scenes.REQUEST)
    assert told.facts.engine_lost
    assert "was taking 4 blocks from the store layerwise when its engine" in told.sentence
    assert "its save of 1 block in step 5 was dropped with the engine (engine-lost)" in (
        told.sentence
    )
    assert "its engine was lost before it had finished: first, the model side of eng-1#0" in (
        told.sentence
    )
    assert "the scheduler side" not in told.sentence
    assert "not ended" not in told.sentence
