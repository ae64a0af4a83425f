"""Compressed files read as what they were, and cannot hurt who reads them."""

import gzip
import os
from pathlib import Path

import pytest

from kvcommon.errors import LogFormatError
from kvcommon.eventlog import LogWriter, compress, read_log
from kvcommon.eventlog.compress import compress_file, compress_later
from kvcommon.eventlog.format import PREAMBLE
from tests.kvcommon.eventlog.logs import event, header, records, write


def test_a_compressed_file_reads_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, 500)
    before = records(path)
    size = path.stat().st_size
    packed = compress_file(path)
    assert not path.exists()
    assert packed.name == "w-1.0.kvlog.gz"
    assert packed.stat().st_mode & 0o777 == 0o600
    assert packed.stat().st_size < size / 3
    assert records(packed) == before


def test_closed_files_are_compressed_and_rotated_away(tmp_path: Path) -> None:
    writer = LogWriter(
        tmp_path, header(), max_bytes=2000, max_files=3, buffer_bytes=100, compressed=True
    )
    import threading

    for seq in range(1, 200):
        writer.record(seq, "", event(seq), [])
        for thread in threading.enumerate():
            if thread.name == "kvlog-gzip":
                thread.join()
    writer.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) <= 3
    assert [name.endswith(".gz") for name in names].count(False) == 1
    seqs = [record.seq for name in names for record in read_log(tmp_path / name)]
    assert sorted(seqs) == list(range(min(seqs), 200))


def test_what_cannot_be_compressed_stays(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    # A directory stands where the new file would be written.
    (tmp_path / "w-1.0.kvlog.gz.part").mkdir()
    with pytest.raises(OSError, match="directory"):
        compress_file(path)
    assert len(records(path)) == 5
    compress_later(path).join()
    assert len(records(path)) == 5


def test_a_torn_compressed_file_gives_what_it_has(tmp_path: Path) -> None:
    packed = compress_file(write(tmp_path, 3000))
    data = packed.read_bytes()
    packed.write_bytes(data[: len(data) // 2])
    reader = read_log(packed)
    seqs = [record.seq for record in reader]
    assert 100 < len(seqs) < 3000
    assert seqs == list(range(1, len(seqs) + 1))


def test_rubbish_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w-1.0.kvlog.gz"
    path.write_bytes(os.urandom(1000))
    with pytest.raises(LogFormatError, match="not a compressed event log"):
        read_log(path)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"MAX_UNPACKED_BYTES": 1 << 20}, "more than 1048576 bytes"),
        ({"_SMALL_BYTES": 1 << 16}, "more than"),
    ],
)
def test_a_bomb_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], text: str
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(compress, name, value)
    path = tmp_path / "w-1.0.kvlog.gz"
    path.write_bytes(gzip.compress(PREAMBLE + bytes(4 << 20)))
    with pytest.raises(LogFormatError, match=text):
        read_log(path)


def test_what_begins_otherwise_is_not_unpacked_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress, "_SMALL_BYTES", 2 << 20)
    path = tmp_path / "w-1.0.kvlog.gz"
    path.write_bytes(gzip.compress(bytes(8 << 20)))
    with pytest.raises(LogFormatError, match="not an event log"):
        read_log(path)
