"""A ring keeps the last seconds, and writes them when there is a reason."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcommon.errors import ConfigError
from kvcommon.eventlog import LogWriter, RingWriter, ask_for_dumps, read_log, redact_id
from kvcommon.eventlog import ring as rings
from kvsched.core.events import MatchAsked
from tests.kvcommon.eventlog.logs import event, header, records

SECOND = 1_000_000_000


def keep(ring: RingWriter, *seqs: int) -> None:
    for seq in seqs:
        ring.record(seq, "", msgspec.structs.replace(event(seq), now_ns=seq * SECOND), [])


def test_nothing_is_written_without_a_reason(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "logs", header(), seconds=5)
    keep(ring, *range(1, 100))
    ring.flush()
    ring.close()
    assert list((tmp_path / "logs").iterdir()) == []
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700


def test_a_dump_holds_the_last_seconds_and_says_where_it_begins(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path, header(), seconds=5)
    keep(ring, *range(1, 100))
    path = ring.dump("because")
    assert path == tmp_path / "w-1.0.kvlog"
    assert [record.seq for record in records(path)] == list(range(94, 100))
    info = read_log(path).header.info
    assert (info["first_seq"], info["ring"]) == ("94", "because")


def test_dumps_follow_each_other_without_overlap(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path, header(), seconds=50)
    keep(ring, 1, 2)
    ring.dump("one")
    assert ring.dump("nothing is kept") is None
    keep(ring, 3, 4)
    path = ring.dump("two")
    assert path is not None
    assert read_log(path).header.part == 1
    assert [record.seq for record in records(path)] == [3, 4]


def test_only_the_newest_dumps_stay(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path, header(), seconds=50, max_files=2)
    for seq in range(1, 5):
        keep(ring, seq)
        ring.dump("again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w-1.2.kvlog", "w-1.3.kvlog"]


def test_memory_is_bounded_by_records_too(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path, header(), seconds=1e6, max_records=3)
    keep(ring, *range(1, 10))
    path = ring.dump("x")
    assert path is not None
    assert [record.seq for record in records(path)] == [7, 8, 9]


def test_a_fault_and_an_alarm_are_reasons(tmp_path: Path) -> None:
    def alarm(happened: msgspec.Struct, _commands: Sequence[msgspec.Struct]) -> str:
        return "step 3" if getattr(getattr(happened, "body", None), "step", 0) == 3 else ""

    ring = RingWriter(tmp_path, header(), seconds=50, alarm=alarm)
    keep(ring, 1, 2, 3)
    ring.wait()
    assert (ring.num_dumps, ring.reason) == (1, "step 3")
    ring.record(4, "", event(4), (), "ValueError: no")
    assert (ring.num_dumps, ring.reason) == (2, "ValueError: no")
    assert records(tmp_path / "w-1.1.kvlog")[0].fault == "ValueError: no"


def test_whoever_touches_the_file_gets_a_dump_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "_LOOK_NS", 0)
    ring = RingWriter(tmp_path, header(), seconds=50)
    keep(ring, 1)
    ring.flush()
    assert ring.num_dumps == 0
    ask_for_dumps(tmp_path)
    ring.flush()
    ring.wait()
    assert ring.num_dumps == 1
    keep(ring, 2)
    ring.flush()
    ring.wait()
    assert ring.num_dumps == 1
    os.utime(tmp_path / "dump", ns=(1, 1))
    ring.flush()
    ring.wait()
    assert ring.num_dumps == 2


class Slow:
    """A ring whose background thread stands before it writes, until it is let go."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.threads: list[str] = []
        real = RingWriter._write

        def write(ring: RingWriter, *args: Any, **options: Any) -> Path | None:
            self.threads.append(threading.current_thread().name)
            if threading.current_thread() is not threading.main_thread():
                assert self.go.wait(30)
            return real(ring, *args, **options)

        monkeypatch.setattr(RingWriter, "_write", write)
        self.ring = RingWriter(
            directory,
            header(),
            seconds=1e6,
            alarm=lambda one, _: "alarm" if getattr(one, "now_ns", 0) % (3 * SECOND) == 0 else "",
        )


def test_an_alarm_is_written_beside_the_thread_that_records_one_dump_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(tmp_path, monkeypatch)
    keep(slow.ring, *range(1, 8))
    assert slow.ring.num_dumps == 0, "the recording thread waited for nothing"
    slow.go.set()
    slow.ring.wait()
    assert slow.ring.num_dumps == 1
    keep(slow.ring, 8)
    slow.ring.wait()
    assert slow.threads == ["kvlog-ring", "kvlog-ring"]
    parts = [[one.seq for one in records(tmp_path / f"w-1.{part}.kvlog")] for part in (0, 1)]
    assert parts == [[1, 2, 3], [4, 5, 6, 7, 8]], "the second alarm was kept, and its records"


def test_a_fault_waits_until_everything_before_it_and_itself_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(tmp_path, monkeypatch)
    keep(slow.ring, 1, 2, 3, 4)
    threading.Timer(0.05, slow.go.set).start()
    slow.ring.record(5, "", event(5), (), "ValueError: no")
    assert slow.ring.num_dumps == 2
    assert slow.threads == ["kvlog-ring", "MainThread"]
    assert [one.seq for one in records(tmp_path / "w-1.1.kvlog")] == [4, 5]


def test_an_orderly_end_writes_what_was_wanted_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(tmp_path, monkeypatch)
    keep(slow.ring, *range(1, 8))
    slow.go.set()
    slow.ring.close()
    assert [one.seq for one in records(tmp_path / "w-1.1.kvlog")] == [4, 5, 6, 7]
    other = RingWriter(tmp_path / "other", header(), seconds=5)
    keep(other, 1)
    other.close()
    assert other.num_dumps == 0


def test_a_dump_is_locked_until_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = []
    real = LogWriter.record

    def record(writer: LogWriter, *args: Any) -> None:
        with writer.path.open("rb") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            locked.append(False)
        real(writer, *args)

    monkeypatch.setattr(LogWriter, "record", record)
    ring = RingWriter(tmp_path, header(), seconds=50)
    keep(ring, 1, 2)
    path = ring.dump("x")
    assert locked == []
    assert path is not None
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_an_old_request_is_not_answered_by_a_new_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "_LOOK_NS", 0)
    ask_for_dumps(tmp_path)
    ring = RingWriter(tmp_path, header(), seconds=50)
    keep(ring, 1)
    ring.flush()
    assert ring.num_dumps == 0


def test_ids_are_hashed_when_written(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path, header(), seconds=50, redacted=True)
    ring.record(1, "", MatchAsked(now_ns=1, request_id="me", num_tokens=1, num_local_tokens=0), [])
    path = ring.dump("x")
    assert path is not None
    data = path.read_bytes()
    assert redact_id("me").encode() in data
    assert b"\xa2me" not in data


def test_a_lost_directory_costs_the_dump_and_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose a directory"):
        RingWriter(tmp_path / "file" / "logs", header(), seconds=5)
    ring = RingWriter(tmp_path / "logs", header(), seconds=5)
    (tmp_path / "logs").rmdir()
    (tmp_path / "logs").write_text("")
    keep(ring, 1, 2)
    assert ring.dump("x") is None
    assert ring.num_dropped == 2
    assert "event log" in ring.reason
