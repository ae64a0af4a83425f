"""The scheduler side's log: where it goes, and what makes a ring write itself."""

from pathlib import Path

from kvcommon.config import ConnectorConfig
from kvcommon.eventlog import read_log
from kvcommon.ids import EngineId, Epoch
from kvcommon.messages import JobEnd, JobOutcome
from kvsched.core.core import CoreConfig
from kvsched.core.events import DaemonLost, JobsReported, RequestFinished, StoreChanged, Ticked
from kvsched.recording import MAX_WAITING, SchedulerLog, alarm


def log(**config: object) -> SchedulerLog:
    options = ConnectorConfig(**config)  # type: ignore[arg-type]
    return SchedulerLog(options, EngineId("engine-1"), Epoch(5), CoreConfig())


def test_events_wait_for_a_daemon_to_say_where(tmp_path: Path) -> None:
    kept = log()
    kept.handle(RequestFinished(now_ns=1, request_id="a"))
    assert kept.place == ""
    kept.offer(str(tmp_path))
    kept.handle(RequestFinished(now_ns=2, request_id="b"), "w:9")
    kept.close()
    (path,) = tmp_path.iterdir()
    found = list(read_log(path))
    assert [(record.seq, record.cause) for record in found] == [(1, ""), (2, "w:9")]
    assert read_log(path).header.info["engine"] == "engine-1"


def test_waiting_is_bounded(tmp_path: Path) -> None:
    kept = log()
    for _ in range(MAX_WAITING + 1):
        kept.handle(Ticked(now_ns=1))
    kept.offer(str(tmp_path))
    assert kept.place == ""
    assert list(tmp_path.iterdir()) == []


def test_a_ring_is_written_when_a_job_fails(tmp_path: Path) -> None:
    kept = log(event_log=str(tmp_path), event_log_mode="ring")
    kept.handle(RequestFinished(now_ns=1, request_id="a"))
    kept.flush()
    assert list(tmp_path.iterdir()) == []
    end = JobEnd(job_id=3, outcome=JobOutcome.FAILED, reason="store-full")
    kept.handle(JobsReported(now_ns=2, rank=0, ends=(end,)))
    kept.close()
    (path,) = tmp_path.iterdir()
    assert read_log(path).header.info["ring"] == "job 3 failed on rank 0: store-full"


def test_what_is_alarming() -> None:
    done = JobEnd(job_id=3, outcome=JobOutcome.DONE)
    assert alarm(JobsReported(now_ns=1, rank=0, ends=(done,)), []) == ""
    assert alarm(StoreChanged(now_ns=1, rank=0, up=True), []) == ""
    assert alarm(StoreChanged(now_ns=1, rank=0, up=False, reason="x"), []) == "store down: x"
    lost = DaemonLost(now_ns=1, rank=2, dead=True, reason="it died")
    assert alarm(lost, []) == "daemon of rank 2 lost: it died"
