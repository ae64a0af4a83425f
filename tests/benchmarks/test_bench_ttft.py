"""The benchmark's checks fail when hit lengths or answers are not as they must be."""

import dataclasses

import pytest

from benchmarks import bench_ttft

REFERENCE = {7: (11, -1.0), 8: (12, -1.5)}


def repeat(variant: str, round_: int = 0, seed: int = 7, scale: float = 1.0) -> bench_ttft.Repeat:
    full = 0 if variant == "none" else 2944
    return bench_ttft.Repeat(
        variant=variant,
        round=round_,
        seed=seed,
        ms={"cold": 900 * scale, "local": 30 * scale, "external": 40 * scale},
        cached={"cold": 0, "local": 2944, "external": full},
        answers=dict.fromkeys(bench_ttft.CASES, REFERENCE[seed]),
        foreign_cores=0.0,
        noisy=False,
    )


def test_nothing_wrong() -> None:
    good = [repeat("none"), repeat("in-tree", seed=8)]
    assert bench_ttft.problems(good, REFERENCE, 3000) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"cached": {"cold": 0, "local": 2944, "external": 2816}}, "tokens hit"),
        ({"answers": dict.fromkeys(bench_ttft.CASES, (12, -1.0))}, "another answer"),
        ({"answers": dict.fromkeys(bench_ttft.CASES, (11, -1.001))}, "another answer"),
    ],
)
def test_other_hits_or_answers(change: dict[str, object], what: str) -> None:
    bad = dataclasses.replace(repeat("in-tree"), **change)  # type: ignore[arg-type]
    assert any(what in line for line in bench_ttft.problems([bad], REFERENCE, 3000))


def test_a_blind_comparison_is_seen() -> None:
    same = {7: (11, -1.0), 8: (11, -1.00001)}
    assert any("blind" in line for line in bench_ttft.problems([], same, 3000))


def test_ratios_are_taken_within_a_round() -> None:
    repeats = [
        repeat("in-tree", 0),
        repeat("kvferry daemon", 0, scale=0.5),
        repeat("in-tree", 1, scale=2),
        repeat("kvferry daemon", 1, scale=1.6),
    ]
    ratio = bench_ttft.ratios(repeats, "external", "kvferry daemon", "in-tree")
    assert (ratio.low, ratio.high, ratio.count) == (0.5, 0.8, 2)
    rows = bench_ttft.summary(repeats, ["in-tree", "kvferry daemon"])
    assert len(rows) == 6
    assert rows[1]["over_in-tree"]["count"] == 2
