import io
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvcommon.errors import ConfigError
from kvcommon.messages import Status, StoreState
from kvworker.cli import app
from kvworker.top import COLUMNS, Reading, find_endpoints, read, row, show
from tests.support.daemonproc import daemon

ENDPOINT = "ipc:///run/npu-3.sock"
BEFORE = {
    'kvferry_bytes_total{kind="save"}': 10e6,
    'kvferry_bytes_total{kind="load"}': 1e6,
    'kvferry_jobs_ended_total{kind="load",outcome="failed",reason="evicted"}': 3.0,
    'kvferry_jobs_ended_total{kind="save",outcome="failed",reason="store-full"}': 1.0,
    'kvferry_jobs_ended_total{kind="save",outcome="done",reason=""}': 50.0,
    'kvferry_lookups_total{reason=""}': 4.0,
    'kvferry_lookups_total{reason="not-stored"}': 2.0,
    "kvferry_lookup_blocks_total": 100.0,
    "kvferry_lookup_hit_blocks_total": 25.0,
    "kvferry_engines_attached": 2.0,
    "kvferry_jobs_open": 7.0,
}
#: Two seconds later.
AFTER = {
    'kvferry_bytes_total{kind="save"}': 14e6,
    'kvferry_bytes_total{kind="load"}': 2e6,
    'kvferry_jobs_ended_total{kind="load",outcome="failed",reason="evicted"}': 5.0,
    'kvferry_jobs_ended_total{kind="save",outcome="failed",reason="store-full"}': 2.0,
    'kvferry_jobs_ended_total{kind="save",outcome="done",reason=""}': 90.0,
    'kvferry_lookups_total{reason=""}': 9.0,
    'kvferry_lookups_total{reason="not-stored"}': 3.0,
    "kvferry_lookup_blocks_total": 140.0,
    "kvferry_lookup_hit_blocks_total": 55.0,
    "kvferry_engines_attached": 1.0,
    "kvferry_jobs_open": 8.0,
}


def reading(
    metrics: dict[str, float], at_s: float, pid: int = 7, state: StoreState = StoreState.UP
) -> Reading:
    status = Status(pid=pid, device="npu:3", store="mooncake", store_state=state, metrics=metrics)
    return Reading(ENDPOINT, status, at_s)


def test_rates_are_what_was_added_since_the_last_look() -> None:
    line = row(reading(BEFORE, 10.0), reading(AFTER, 12.0))
    assert line == ["npu:3", "mooncake up", "1", "8", "2.0", "0.5", "3.0", "75%", "1.5"]
    assert len(line) == len(COLUMNS)


@pytest.mark.parametrize(
    "before", [None, reading(BEFORE, 10.0, pid=6), Reading(ENDPOINT, None, 10.0)]
)
def test_there_are_no_rates_before_a_second_look_at_the_same_daemon(before: Reading | None) -> None:
    line = row(before, reading(AFTER, 12.0))
    assert line == ["npu:3", "mooncake up", "1", "8", "-", "-", "-", "-", "-"]


def test_without_a_lookup_there_is_no_share() -> None:
    assert row(reading(BEFORE, 10.0), reading(BEFORE, 12.0))[-2] == "-"


def test_what_is_down_or_silent_is_said() -> None:
    assert "DOWN" in row(None, reading(BEFORE, 1.0, state=StoreState.DOWN))[1]
    silent = row(reading(BEFORE, 1.0), Reading(ENDPOINT, None, 2.0))
    assert silent[0] == ENDPOINT
    assert "no answer" in silent[1]
    assert len(silent) == len(COLUMNS)


def test_a_directory_without_daemons_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no daemon serves in {tmp_path}"):
        find_endpoints(tmp_path)


def test_daemons_are_found_and_one_that_is_frozen_is_shown_as_silent() -> None:
    with daemon() as running:
        done = CliRunner().invoke(
            app, ["top", "--run-dir", str(running.directory), "--interval", "0.1", "--rounds", "2"]
        )
        assert done.exit_code == 0
        assert "cpu:0" in done.output
        endpoints = find_endpoints(running.directory)
        assert endpoints == [running.endpoint]
        text = io.StringIO()
        os.kill(running.pid, signal.SIGSTOP)
        try:
            show(endpoints, 0.1, 1, Console(file=text, width=100))
            assert [each.status for each in read(endpoints, 0.1)] == [None]
        finally:
            os.kill(running.pid, signal.SIGCONT)
        assert "no answer" in text.getvalue()
