"""A short run of the fuzzer, within its memory limit; and that it would notice."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fuzz_eventlog
from kvcommon.eventlog import read_log
from tests.support.daemonproc import environment

SCRIPT = Path(__file__).parents[2] / "tools" / "fuzz_eventlog.py"


def test_a_short_run_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--count", "1500", "--seed", "7", "--seconds", "60"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "records read" in done.stdout


def test_inputs_come_again_and_are_broken(tmp_path: Path) -> None:
    goods = fuzz_eventlog.good_logs(tmp_path)
    assert goods == fuzz_eventlog.good_logs(tmp_path / "another run")
    assert fuzz_eventlog.build(fuzz_eventlog.frames_of(goods[0])) == goods[0]
    inputs = [fuzz_eventlog.make_input(goods, 3, number) for number in range(200)]
    assert inputs == [fuzz_eventlog.make_input(goods, 3, number) for number in range(200)]
    assert sum(data in goods for _, data in inputs) < 20
    assert {name for name, _ in inputs} == {"x.0.kvlog", "x.0.kvlog.gz"}
    whole = sum(len(list(read_log(path))) for path in tmp_path.glob("*.kvlog"))
    assert whole == 18


def test_no_input_outgrows_the_memory_of_the_fuzzer() -> None:
    rng = random.Random(1)
    seen = set()
    for _ in range(300):
        value: list[Any] = [[0] * 60]
        for _ in range(4):
            value = [value * fuzz_eventlog._times(value, rng)]
        size = len(msgspec.msgpack.encode(value))
        assert size <= fuzz_eventlog.MAX_INPUT_BYTES + 100
        seen.add(size)
    assert max(seen) > 100_000


def test_a_reader_that_raises_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(path: Path, number: int) -> int:
        if number == 3:
            raise IndexError(path.name)
        return 0

    monkeypatch.setattr(fuzz_eventlog, "read", broken)
    with pytest.raises(IndexError):
        fuzz_eventlog.run(range(10), 0, 60.0, tmp_path)
    assert "input 3 of seed 0 failed" in capsys.readouterr().err
