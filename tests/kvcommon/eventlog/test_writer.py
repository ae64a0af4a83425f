"""Writing: rotation, modes, and what happens when the file cannot be written."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from kvcommon.errors import ConfigError
from kvcommon.eventlog import MAX_PAYLOAD_BYTES, Dropped, LogWriter, read_log
from tests.kvcommon.eventlog.logs import event, header, records


def test_what_is_written_is_read(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "logs", header())
    writer.record(1, "s-1:9", event(1), [])
    writer.record(2, "", event(2), [], "ValueError: no")
    writer.flush()
    first, second = records(writer.path)
    writer.close()
    assert (first.seq, first.cause, first.fault) == (1, "s-1:9", "")
    assert msgspec.msgpack.decode(first.event)["body"]["num_layers"] == 4
    assert second.fault == "ValueError: no"


def test_directory_and_file_are_private(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "logs", header())
    writer.close()
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    assert writer.path.stat().st_mode & 0o777 == 0o600
    assert writer.path.name == "w-1.0.kvlog"


def test_a_buffer_is_written_only_when_it_is_full_or_flushed(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, header(), buffer_bytes=1 << 16)
    writer.record(1, "", event(1), [])
    assert records(writer.path) == []
    writer.flush()
    assert len(records(writer.path)) == 1
    before = writer.path.stat().st_size
    for seq in range(2, 3000):
        writer.record(seq, "", event(seq), [])
    assert writer.path.stat().st_size > before
    writer.close()


def test_rotation_by_size_and_count(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, header(), max_bytes=2000, max_files=3, buffer_bytes=100)
    for seq in range(1, 200):
        writer.record(seq, "", event(seq), [])
    writer.close()
    parts = sorted(tmp_path.iterdir(), key=lambda path: int(path.name.split(".")[1]))
    assert 2 <= len(parts) <= 3
    assert all(part.stat().st_size < 4000 for part in parts)
    seqs = [record.seq for part in parts for record in read_log(part)]
    assert seqs == list(range(seqs[0], 200))
    assert seqs[0] > 1
    assert [read_log(part).header.part for part in parts] == [
        int(part.name.split(".")[1]) for part in parts
    ]


def test_an_existing_log_is_not_touched(tmp_path: Path) -> None:
    LogWriter(tmp_path, header()).close()
    with pytest.raises(ConfigError, match="event log"):
        LogWriter(tmp_path, header())


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose a directory"):
        LogWriter(tmp_path / "file" / "logs", header())


def test_full_disk_drops_counts_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for a part of a buffer, then none, then plenty again."""
    writer = LogWriter(tmp_path, header(), buffer_bytes=500)
    room = 700
    really_write = os.write

    def write(fd: int, data: bytearray) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = really_write(fd, bytes(data[:room]))
        room -= count
        return count

    monkeypatch.setattr(os, "write", write)
    for seq in range(1, 101):
        writer.record(seq, "", event(seq), [])
    assert writer.num_dropped > 0
    assert "No space left" in writer.error
    room = 1 << 20
    writer.flush()
    assert writer.error == ""
    writer.record(101, "", event(101), [])
    writer.close()
    reader = read_log(writer.path)
    seqs = [record.seq for record in reader]
    assert not reader.damage
    assert not reader.torn
    last = 100 - writer.num_dropped
    assert seqs == [*range(1, last + 1), 101]
    assert reader.dropped == [
        Dropped(num_dropped=writer.num_dropped, first_seq=last + 1, last_seq=100)
    ]


def test_a_record_that_is_too_large_or_not_encodable_is_dropped(tmp_path: Path) -> None:
    class Odd(msgspec.Struct):
        value: object

    writer = LogWriter(tmp_path, header())
    writer.record(1, "", event(1, "x" * (MAX_PAYLOAD_BYTES + 1)), [])
    writer.record(2, "", Odd(object()), [])
    writer.record(3, "", event(3), [])
    writer.close()
    reader = read_log(writer.path)
    assert [record.seq for record in reader] == [3]
    assert reader.dropped == [
        Dropped(num_dropped=1, first_seq=1, last_seq=1),
        Dropped(num_dropped=1, first_seq=2, last_seq=2),
    ]


def test_a_lost_directory_is_survived_at_rotation(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    writer = LogWriter(logs, header(), max_bytes=500, buffer_bytes=100)
    logs.rename(tmp_path / "away")
    for seq in range(1, 50):
        writer.record(seq, "", event(seq), [])
    assert writer.num_dropped > 0
    (tmp_path / "away").rename(logs)
    writer.flush()
    writer.record(50, "", event(50), [])
    writer.close()
    reader = read_log(writer.path)
    assert [record.seq for record in reader] == [50]
    assert reader.dropped[0].num_dropped == writer.num_dropped
