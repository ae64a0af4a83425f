"""Reading what is whole, torn, damaged or hostile."""

import os
import random
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcommon.errors import LogFormatError
from kvcommon.eventlog import LogWriter, RawRecord, read_log
from kvcommon.eventlog.format import FRAME, PREAMBLE, checksum
from tests.kvcommon.eventlog.logs import event, header, records, write

#: Records of the log that is cut and damaged.
COUNT = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("whole"), COUNT).read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "w-1.0.kvlog"


def starts_of(data: bytes) -> list[int]:
    """Offsets of the header frame, of each record frame, and the end."""
    offsets = [len(PREAMBLE)]
    while offsets[-1] < len(data):
        length, _ = FRAME.unpack_from(data, offsets[-1])
        offsets.append(offsets[-1] + FRAME.size + length)
    return offsets


def read_or_refuse(path: Path) -> tuple[list[RawRecord], bool, list[int]] | None:
    try:
        reader = read_log(path)
    except LogFormatError:
        return None
    found = list(reader)
    return found, reader.torn, [damage.offset for damage in reader.damage]


def test_whole_log(whole: bytes, scratch: Path) -> None:
    scratch.write_bytes(whole)
    reader = read_log(scratch)
    assert [record.seq for record in reader] == list(range(1, COUNT + 1))
    assert not reader.torn
    assert not reader.damage
    assert reader.header.name == "w-1"
    assert [record.seq for record in reader] == list(range(1, COUNT + 1)), "a second reading"


def test_every_truncation_reads_as_a_prefix(whole: bytes, scratch: Path) -> None:
    scratch.write_bytes(whole)
    expected = records(scratch)
    offsets = starts_of(whole)
    for size in range(len(whole)):
        scratch.write_bytes(whole[:size])
        result = read_or_refuse(scratch)
        if size < offsets[1]:
            assert result is None
            continue
        assert result is not None
        found, torn, damage = result
        num_whole = sum(1 for offset in offsets[2:] if offset <= size)
        assert found == expected[:num_whole]
        assert torn == (size not in offsets)
        assert not damage


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_flipped_byte_costs_only_its_own_record(
    whole: bytes, scratch: Path, place: float, flip: int
) -> None:
    at = int(place * len(whole))
    damaged = bytearray(whole)
    damaged[at] ^= flip
    scratch.write_bytes(whole)
    expected = records(scratch)
    scratch.write_bytes(damaged)
    result = read_or_refuse(scratch)
    offsets = starts_of(whole)
    if at < offsets[1]:
        assert result is None, "a header that is not as written is refused, not believed"
        return
    assert result is not None
    found, torn, damage = result
    hit = max(index for index, offset in enumerate(offsets) if offset <= at)
    assert found == expected[: hit - 1] + expected[hit:]
    assert damage == ([] if torn else [offsets[hit]])
    assert not torn or hit == COUNT


def test_damage_over_several_records_is_one_place(whole: bytes, scratch: Path) -> None:
    offsets = starts_of(whole)
    damaged = whole[: offsets[3]] + b"\xff" * 70 + whole[offsets[3] + 70 :]
    scratch.write_bytes(damaged)
    reader = read_log(scratch)
    seqs = [record.seq for record in reader]
    after = min(offset for offset in offsets if offset >= offsets[3] + 70)
    assert seqs == [1, 2, *range(offsets.index(after), COUNT + 1)]
    (place,) = reader.damage
    assert (place.offset, place.num_bytes) == (offsets[3], after - offsets[3])
    assert "length" in place.reason


def test_a_frame_inside_a_payload_is_not_taken_for_one(tmp_path: Path) -> None:
    """Behind damage, bytes that a user put into a field cannot become a record."""
    forged = msgspec.msgpack.encode((99, "", {}, [], ""))
    inner = FRAME.pack(len(forged), checksum(forged, 0)) + forged
    path = write(tmp_path, 1)
    data = bytearray(path.read_bytes())
    for position in (len(data),):
        payload = msgspec.msgpack.encode((2, "", inner, [], ""))
        data += FRAME.pack(len(payload), checksum(payload, position) ^ 1) + payload
    path.write_bytes(data)
    reader = read_log(path)
    assert [record.seq for record in reader] == [1]
    assert reader.num_damaged == 1


def test_undecodable_payload_with_a_good_checksum_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    data = bytearray(path.read_bytes())
    hostile = [
        b"\x95\x01",
        b"\xdd\xff\xff\xff\xff" + b"\x01" * 10,
        b"\x91" * 5000 + b"\x01",
        b"\x95\x01\xa0" + b"\x91" * 100_000,
        b"\x83\xabnum_dropped\xa1x",
        b"\xc1",
        b"\x95\x01\xa2\xff\xfe\x80\x90\xa0",
    ]
    for payload in hostile:
        data += FRAME.pack(len(payload), checksum(payload, len(data))) + payload
    path.write_bytes(data)
    reader = read_log(path)
    assert [record.seq for record in reader] == [1]
    assert reader.num_damaged == len(hostile)
    assert all("not a record" in damage.reason for damage in reader.damage)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an event log"),
        (b"GIF89a and more", "not an event log"),
        (b"kvflog\x63\x00" + b"\0" * 8, "format 99"),
        (PREAMBLE + b"\x01", "torn"),
        (PREAMBLE + FRAME.pack(1 << 30, 0), "impossible length"),
        (PREAMBLE + FRAME.pack(3, 0) + b"abc", "damaged"),
        (PREAMBLE + FRAME.pack(1, checksum(b"\x80", 8)) + b"\x80", "broken"),
    ],
)
def test_what_is_no_log_is_refused_in_words(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.0.kvlog"
    path.write_bytes(data)
    with pytest.raises(LogFormatError, match=message):
        read_log(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "\x1b[31mred"},
        {"name": "../../etc/x"},
        {"name": "a\nb"},
        {"name": ""},
        {"part": -1},
        {"part": 1 << 40},
    ],
)
def test_a_header_that_names_what_no_writer_would_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    payload = msgspec.msgpack.encode(msgspec.structs.replace(header(), **changes))
    frame = FRAME.pack(len(payload), checksum(payload, len(PREAMBLE))) + payload
    path = tmp_path / "x.0.kvlog"
    path.write_bytes(PREAMBLE + frame)
    with pytest.raises(LogFormatError, match="header is broken") as caught:
        read_log(path)
    assert str(caught.value).isprintable()


def test_a_huge_hole_costs_no_reading(tmp_path: Path) -> None:
    """A terabyte of nothing, and a good record behind it."""
    path = write(tmp_path, 2)
    end = 1 << 40
    payload = msgspec.msgpack.encode((3, "", event(3), [], ""))
    with path.open("r+b") as file:
        file.seek(end)
        file.write(FRAME.pack(len(payload), checksum(payload, end)) + payload)
    reader = read_log(path)
    assert [record.seq for record in reader] == [1, 2, 3]
    assert reader.num_damaged == 1
    os.truncate(path, end)
    assert [record.seq for record in reader] == [1, 2]


def test_a_fifo_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.0.kvlog")
    with pytest.raises(LogFormatError, match="not a regular file"):
        read_log(tmp_path / "x.0.kvlog")


def test_a_file_full_of_false_frames_is_given_up_in_bounded_work(tmp_path: Path) -> None:
    """Every fourth byte looks like the start of a frame of one megabyte."""
    path = write(tmp_path, 2)
    bait = struct.pack("<I", 0x00900000) * (3 << 20)
    path.write_bytes(path.read_bytes() + b"\xff" * 16 + bait)
    reader = read_log(path)
    assert [record.seq for record in reader] == [1, 2]
    assert reader.num_damaged == 1


def test_random_bytes_behind_a_header(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    good = path.read_bytes()
    rng = random.Random(5)
    for _ in range(300):
        path.write_bytes(good + rng.randbytes(rng.randrange(200)))
        assert [record.seq for record in read_log(path)] == [1]


def test_header_is_what_was_written(tmp_path: Path) -> None:
    wanted = header()
    got = read_log(write(tmp_path, 0)).header
    assert got.config == wanted.config
    assert got.versions == {"kvferry": "0"}


def test_batches_are_the_records_undecoded(whole: bytes, scratch: Path) -> None:
    scratch.write_bytes(whole)
    reader = read_log(scratch)
    (batch,) = reader.batches()
    offset, payloads = batch
    assert whole.find(payloads[0]) == offset + FRAME.size
    decoder = msgspec.msgpack.Decoder(RawRecord)
    assert [decoder.decode(payload) for payload in payloads] == list(reader)


def test_batches_end_at_damage_and_go_on_behind_it(whole: bytes, scratch: Path) -> None:
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    scratch.write_bytes(data)
    reader = read_log(scratch)
    sizes = [len(payloads) for _, payloads in reader.batches()]
    assert len(sizes) == 2
    assert sum(sizes) == COUNT - 1
    assert reader.num_damaged == 1


def test_records_larger_than_a_window(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, header())
    for seq, num_bytes in enumerate((10, 3 << 20, 10, 9 << 20, 10), start=1):
        writer.record(seq, "", event(seq, "x" * num_bytes), [])
    writer.close()
    reader = read_log(writer.path)
    assert [record.seq for record in reader] == [1, 2, 3, 4, 5]
    assert (reader.torn, reader.num_damaged) == (False, 0)
    data = writer.path.read_bytes()
    writer.path.write_bytes(data[: 3 << 20])
    assert [record.seq for record in read_log(writer.path)] == [1]
