"""Causal order of several logs."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvcommon.eventlog import LogWriter, make_header
from kvreplay.loading import Log, open_logs
from kvreplay.merge import merge
from kvsched.core.events import Ticked
from tests.kvreplay import scenes

Record = tuple[int, str]


def write(directory: Path, logs: dict[str, list[Record]]) -> list[Log]:
    """Each record is (time, cause)."""
    for name, records in logs.items():
        header = make_header("kvsched", name, 1, scenes.Config(), versions={})
        writer = LogWriter(directory, header)
        for seq, (now_ns, cause) in enumerate(records, 1):
            writer.record(seq, cause, Ticked(now_ns=now_ns), [])
        writer.close()
    return open_logs([directory]).logs


def order(logs: list[Log]) -> list[str]:
    return [entry.stimulus for entry in merge(logs)]


def test_time_orders_logs(tmp_path: Path) -> None:
    logs = write(tmp_path, {"a": [(1, ""), (4, "")], "b": [(2, ""), (3, "")]})
    assert order(logs) == ["a:1", "b:1", "b:2", "a:2"]


def test_a_tie_is_broken_by_the_cause(tmp_path: Path) -> None:
    logs = write(tmp_path, {"a": [(5, "b:1"), (5, "")], "b": [(5, ""), (5, "a:2")]})
    assert order(logs) == ["b:1", "a:1", "a:2", "b:2"]


def test_a_cause_comes_first_even_against_the_clock(tmp_path: Path) -> None:
    logs = write(tmp_path, {"a": [(1, "b:2")], "b": [(5, ""), (6, "")]})
    assert order(logs) == ["b:1", "b:2", "a:1"]


def test_a_circle_of_causes_and_unknown_causes_end(tmp_path: Path) -> None:
    logs = write(tmp_path, {"a": [(1, "b:1"), (2, "x:9")], "b": [(1, "a:1"), (2, "a:99")]})
    assert sorted(order(logs)) == ["a:1", "a:2", "b:1", "b:2"]


def test_a_clock_that_goes_back_does_not_reorder_a_log(tmp_path: Path) -> None:
    logs = write(tmp_path, {"a": [(5, ""), (1, "")], "b": [(3, "")]})
    assert order(logs) == ["b:1", "a:1", "a:2"]


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 9), st.sampled_from(["", "a:1", "b:2", "c:3"])), max_size=5
        ),
        min_size=3,
        max_size=3,
    )
)
def test_every_record_comes_once_and_each_log_stays_in_order(
    tmp_path_factory: object, records: list[list[Record]]
) -> None:
    directory = tmp_path_factory.mktemp("merge")  # type: ignore[attr-defined]
    logs = write(directory, dict(zip("abc", records, strict=True)))
    found = order(logs)
    for name, expected in zip("abc", records, strict=True):
        mine = [one for one in found if one.startswith(name)]
        assert mine == [f"{name}:{seq}" for seq in range(1, len(expected) + 1)]
