"""Parts are put together; what cannot be decoded is named."""

import json
from pathlib import Path

import msgspec
import pytest

from kvcommon.eventlog import LogWriter, make_header
from kvreplay.loading import open_logs, plain
from kvsched.core.commands import AnswerMatch
from kvsched.core.events import RequestFinished, Ticked
from tests.kvreplay import scenes


class Strange(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    now_ns: int


def test_a_scene_is_two_logs_with_typed_entries(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.miss(scene)
    logs = scene.close()
    assert [log.label for log in logs.logs] == [scenes.SCHED, scenes.WORKER]
    entries = list(logs.logs[0])
    assert entries[0].kind == "RequestAdded"
    assert entries[-1].event == RequestFinished(now_ns=entries[-1].at_ns, request_id=scenes.REQUEST)
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    assert not logs.logs[0].problems


def test_parts_are_read_in_order_and_a_missing_one_is_named(tmp_path: Path) -> None:
    header = make_header("kvsched", "s", 1, scenes.Config(), versions={})
    writer = LogWriter(tmp_path, header, max_bytes=300, max_files=99, buffer_bytes=1)
    for seq in range(1, 61):
        writer.record(seq, "", Ticked(now_ns=seq), [])
    writer.close()
    (log,) = open_logs([tmp_path]).logs
    assert [entry.seq for entry in log] == list(range(1, 61))
    parts = sorted(tmp_path.iterdir(), key=lambda path: int(path.name.split(".")[1]))
    assert len(parts) > 3
    parts[1].unlink()
    (log,) = open_logs([tmp_path]).logs
    seqs = [entry.seq for entry in log]
    assert seqs != list(range(seqs[0], 61))
    assert log.has_gaps
    assert any("is missing" in text for text in log.problems)


def test_rotated_away_beginning_is_said_but_is_no_gap(tmp_path: Path) -> None:
    header = make_header("kvsched", "s", 1, scenes.Config(), versions={})
    writer = LogWriter(tmp_path, header, max_bytes=300, max_files=2, buffer_bytes=1)
    for seq in range(1, 61):
        writer.record(seq, "", Ticked(now_ns=seq), [])
    writer.close()
    (log,) = open_logs([tmp_path]).logs
    assert len(list(log)) > 0
    assert not log.begins_at_start
    assert not log.has_gaps
    assert "rotated away" in log.problems[0]


def test_unknown_and_malformed_records_are_named_not_raised(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, make_header("kvsched", "s", 1, scenes.Config(), versions={}))
    writer.record(1, "", Strange(now_ns=1), [])
    writer.record(2, "", Ticked(now_ns=2), [Strange(now_ns=1)])
    writer.record(3, "", Ticked(now_ns=3), [AnswerMatch(request_id="r", num_tokens=1)])
    writer.close()
    (log,) = open_logs([tmp_path]).logs
    first, second, third = log
    assert first.event is None
    assert "event" in first.problem
    assert first.kind == "?"
    assert second.kind == "Ticked"
    assert "command" in second.problem
    assert third.problem == ""
    assert len(log.problems) == 2


def test_two_processes_of_one_name_are_two_logs(tmp_path: Path) -> None:
    for epoch, folder in ((1, "a"), (2, "b")):
        header = make_header("kvsched", "s", epoch, scenes.Config(), versions={})
        LogWriter(tmp_path / folder, header).close()
    logs = open_logs([tmp_path / "a", tmp_path / "b"])
    assert [log.label for log in logs.logs] == ["s", "s~2"]


@pytest.mark.parametrize(("boot", "shift"), [("x", 0), ("y", 500)])
def test_clocks_of_another_boot_are_shifted(tmp_path: Path, boot: str, shift: int) -> None:
    for name, where, wall in (("a", "x", 10_000), ("b", boot, 10_500)):
        header = make_header("kvsched", name, 1, scenes.Config(), versions={}, info={"boot": where})
        header = msgspec.structs.replace(header, wall_ns=wall, mono_ns=1000)
        writer = LogWriter(tmp_path, header)
        writer.record(1, "", Ticked(now_ns=2000), [])
        writer.close()
    first, second = open_logs([tmp_path]).logs
    assert next(iter(first)).at_ns == 2000
    assert next(iter(second)).at_ns == 2000 + shift


def test_what_is_no_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.0.kvlog").write_bytes(b"nonsense")
    (tmp_path / "empty").mkdir()
    logs = open_logs([tmp_path, tmp_path / "empty", tmp_path / "absent.0.kvlog"])
    assert not logs.logs
    assert len(logs.unreadable) == 3


def test_plain_values_are_json() -> None:
    text = json.dumps(plain([scenes.load_job(), {1: b"\x01"}]))
    job, table = json.loads(text)
    assert job["type"] == "LoadJob"
    assert job["block_hashes"][0] == "01" * 32
    assert table == {"1": "01"}
