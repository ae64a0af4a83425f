"""The tables that people read."""

import io

from rich.console import Console

from kvcommon.messages import Status, StoreState
from kvworker.tables import print_status


def shown(status: Status, width: int = 140) -> str:
    text = io.StringIO()
    print_status(status, Console(file=text, width=width))
    return text.getvalue()


def test_a_fresh_daemon() -> None:
    text = shown(Status(pid=7, device="npu:3", store="mooncake", version="1.2", uptime_s=3725.0))
    assert "npu:3" in text
    assert "pid 7" in text
    assert "1:02:05" in text
    assert "mooncake: up" in text
    assert "no engine has attached yet" in text
    assert "no job has ended yet" in text


def test_rows_may_have_different_columns() -> None:
    text = shown(
        Status(
            pid=7,
            device="npu:3",
            store="mooncake",
            store_state=StoreState.DOWN,
            engines=({"engine": "e#0", "attached": True}, {"engine": "f#1", "open_jobs": 4}),
            recent=({"job": 9, "outcome": "failed", "seconds": 0.25},),
            metrics={"kvferry_b": 2.0, "kvferry_a": 1e9},
        )
    )
    assert "DOWN" in text
    for word in ("attached", "open jobs", "yes", "e#0", "f#1", "failed", "0.25", "1e+09"):
        assert word in text
    assert text.index("kvferry_a") < text.index("kvferry_b")


def test_nothing_is_cut_where_there_is_little_room() -> None:
    """80 columns are a pipe's, and many a terminal's."""
    engine: dict[str, str | int | float | bool] = {
        f"column_{index}": f"value-{index}" for index in range(14)
    }
    status = Status(
        pid=7,
        device="npu:3",
        store="mooncake",
        engines=(engine,),
        metrics={"kvferry_" + 90 * "a": 1},
    )
    text = shown(status, width=80)
    assert "…" not in text
    for name, value in engine.items():
        assert f"{name.replace('_', ' ')} {value}" in text
    assert "kvferry_" + 90 * "a" in text
