"""Where two runs part, and how their numbers differ."""

import json
from pathlib import Path

import pytest

from kvreplay.diff import compare, compare_stats
from kvreplay.loading import LogSet
from kvreplay.requests import read_requests
from kvreplay.stats import gather
from tests.kvreplay.pair import Pair


def runs(directory: Path, texts: str, names: str = "req") -> LogSet:
    pair = Pair(directory)
    for number, text in enumerate(texts):
        pair.serve(f"{names}-{number}", 100, text, step=3 * number + 1, first_block=10)
    return pair.close()


def test_a_run_is_like_itself_and_like_one_with_other_ids(tmp_path: Path) -> None:
    one = runs(tmp_path / "a", "aba")
    other = runs(tmp_path / "b", "aba", "other")
    for found in (compare(one, one), compare(one, other)):
        assert (found.status, found.num_different, found.first) == (0, 0, None)
    assert all(row.change in {0, None} for row in compare(one, one).rows)


def test_the_first_divergence_is_named_with_both_sentences(tmp_path: Path) -> None:
    found = compare(runs(tmp_path / "a", "abab"), runs(tmp_path / "b", "abcb"))
    assert (found.status, found.num_different) == (1, 1)
    first = found.first
    assert first is not None
    assert (first.number, first.request_a, first.request_b) == (3, "req-2", "req-2")
    assert "outcome: hit, then miss" in first.what
    assert "took 96 tokens" in first.sentence_a
    assert "not-stored" in first.sentence_b
    assert first.record_a.startswith("kvsched-eng1:")
    assert first.record_b
    assert json.loads(json.dumps(found.plain()))["first"]["number"] == 3


def test_a_request_that_is_in_one_run_only(tmp_path: Path) -> None:
    found = compare(runs(tmp_path / "a", "aba"), runs(tmp_path / "b", "ab"))
    assert found.first is not None
    assert found.first.what == ["the request is in one run only"]
    assert (found.num_a, found.num_b, found.first.request_b) == (3, 2, "")


def test_requests_beyond_the_bound_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvreplay.diff.read_requests", lambda logs: read_requests(logs, 2))
    found = compare(runs(tmp_path / "a", "aba"), runs(tmp_path / "b", "ab"))
    assert found.first is None
    assert found.left_out == (1, 0)
    assert found.plain()["left_out"] == [1, 0]


def test_numbers_side_by_side(tmp_path: Path) -> None:
    one, other = runs(tmp_path / "a", "abab"), runs(tmp_path / "b", "abcb")
    rows = {row.name: row for row in compare_stats(gather(one), gather(other))}
    assert (rows["answered with a hit"].a, rows["answered with a hit"].b) == (2, 1)
    assert rows["answered with a hit"].change == -0.5
    assert rows["not: not-stored"].b == 3
    assert rows["load done"].text_a == "2"
    assert rows["loaded"].text_a == "576 B"
    assert "LoadLayers p95" in rows
