"""Counting without decoding gives what decoding gives."""

from collections import Counter
from pathlib import Path

import pytest

from kvcommon.eventlog import LogWriter, redact_id
from kvreplay.loading import LogSet, open_logs
from kvreplay.scan import Wanted, scan, time_of
from kvreplay.show import Filters, kinds_of, select
from tests.kvreplay.pair import Pair


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> LogSet:
    pair = Pair(tmp_path_factory.mktemp("logs"), ranks=2)
    for number, text in enumerate("abcab"):
        pair.serve(f"req-{number}", 100 + number, text, step=3 * number + 1, first_block=10)
    return pair.close()


def test_all_records_by_kind(logs: LogSet) -> None:
    decoded = [entry for log in logs.logs for entry in log]
    summary = scan(logs)
    assert summary.kinds == Counter(entry.kind for entry in decoded)
    assert summary.num_records == summary.num_wanted == len(decoded)
    assert summary.first_ns == min(entry.at_ns for entry in decoded)
    assert summary.last_ns == max(entry.at_ns for entry in decoded)
    assert (summary.num_dropped, summary.num_damaged, summary.torn) == (0, 0, [])


@pytest.mark.parametrize("kind", ["LookupAnswered", "LoadLayers", "StepPlan", "Nothing"])
def test_a_kind_of_event_command_or_message(logs: LogSet, kind: str) -> None:
    wanted = [e for log in logs.logs for e in log if kind.lower() in kinds_of(e)]
    assert scan(logs, Wanted(kind=kind)).num_wanted == len(wanted)
    assert (kind == "Nothing") == (not wanted)


def test_a_request_by_its_whole_id(logs: LogSet) -> None:
    named = scan(logs, Wanted(request="req-3"))
    assert named.kinds["RequestAdded"] == named.kinds["RequestFinished"] == 1
    assert scan(logs, Wanted(request="req-")).num_wanted == 0


def test_a_request_whose_id_is_hashed_by_its_real_id_and_by_its_hash(
    logs: LogSet, tmp_path: Path
) -> None:
    for log in logs.logs:
        writer = LogWriter(tmp_path, log.header, redacted=True)
        for entry in log:
            assert entry.event is not None
            writer.record(entry.seq, entry.cause, entry.event, entry.commands)
        writer.close()
    hashed = open_logs([tmp_path])
    plain = scan(logs, Wanted(request="req-3"))
    assert scan(hashed, Wanted(request="req-3")).kinds == plain.kinds
    assert scan(hashed, Wanted(request=redact_id("req-3"))).kinds == plain.kinds
    both = Wanted(request="req-3", kind="LookupAnswered")
    assert scan(hashed, both).kinds == scan(logs, both).kinds
    assert scan(hashed, Wanted(request="req-9")).num_wanted == 0


def test_times_are_counted_as_show_counts_them(logs: LogSet) -> None:
    low, high = 20_000_000, 60_000_000
    shown = list(select(logs, Filters(from_ns=low, to_ns=high, ticks=True)))
    summary = scan(logs, Wanted(from_ns=low, to_ns=high))
    assert summary.kinds == Counter(entry.kind for entry in shown)
    assert 10 < summary.num_wanted < summary.num_records


def test_damage_and_torn_ends_are_counted(logs: LogSet, tmp_path: Path) -> None:
    whole = scan(logs).num_records
    for log in logs.logs:
        data = bytearray(log.parts[0].path.read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / log.parts[0].path.name).write_bytes(data[:-3])
    summary = scan(open_logs([tmp_path]))
    assert (summary.num_damaged, len(summary.torn)) == (3, 3)
    assert summary.num_records == whole - 6


@pytest.mark.parametrize(
    ("record", "time"),
    [
        (b"\x95\x01\xa0\x82\xa4type\xa2ab\xa6now_ns\x07" + b"\0" * 16, 7),
        (b"\x95\x01\xa0\x82\xa4type\xa2ab\xa6now_ns\xcd\x01\x02" + b"\0" * 16, 258),
        (b"\x95\x01\xa0\x82\xa4type\xa2ab\xa6now_ns\xc0" + b"\0" * 16, None),
        (b"\x95\x01\xa0\x82\xa4type\xa2ab\xa5other\x07" + b"\0" * 16, None),
        (b"\x95\x01\xa0", None),
        (b"\xa4type", None),
        (b"\x95\x01\xa0\x82\xa4type", None),
    ],
)
def test_times_stand_where_we_write_them(record: bytes, time: int | None) -> None:
    assert time_of(record) == time
