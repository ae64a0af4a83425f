"""A ring keeps the last seconds, and writes them when there is a reason."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvcommon.errors import ConfigError
from kvcommon.eventlog import RingWriter, ask_for_dumps, read_log, redact_id
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
    assert ring.num_dumps == 1
    keep(ring, 2)
    ring.flush()
    assert ring.num_dumps == 1
    os.utime(tmp_path / "dump", ns=(1, 1))
    ring.flush()
    assert ring.num_dumps == 2


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
