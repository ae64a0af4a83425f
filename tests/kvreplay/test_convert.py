"""Old formats become the present one, step by step.

The file of format 0 was written by ``write_format_0``:

    .venv/bin/python tests/kvreplay/test_convert.py
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from kvcommon.errors import LogFormatError
from kvcommon.eventlog import read_log
from kvcommon.eventlog.format import FORMAT_VERSION
from kvreplay.cli import app
from kvreplay.convert import CONVERTERS, convert, format_of
from kvreplay.loading import open_logs
from kvreplay.story import tell
from kvreplay.verify import verify
from tests.support import schedplay

FORMATS = Path(__file__).parents[1] / "histories" / "formats"
OLD = FORMATS / "format0.kvlog"


def frame(value: Any) -> bytes:
    payload = msgspec.msgpack.encode(value)
    return len(payload).to_bytes(4, "little") + payload


def write_format_0(path: Path) -> None:
    """What the prototype wrote about two requests, one of which hit."""
    play = schedplay.Play()
    for number, name in enumerate(("first", "second"), start=1):
        play.admit(name, 100, 6 * (number - 1), range(1, 8))
        play.step(number, schedplay.new(name, range(1, 8), 96 * (number - 1), 4))
        play.ack(number)
        play.end_all()
        play.done(number)
        play.end_all()
        play.finish(name)
    header = {
        "side": "scheduler", "name": "old-1", "pid": 4711, "started_ns": play.now_ns,
        "config": play.config,
    }  # fmt: skip
    records = [frame((event, commands)) for event, commands in play.story]
    path.write_bytes(b"kvflog\x00\x00" + frame(header) + b"".join(records))


def test_there_is_a_converter_from_every_older_format_and_a_file_of_each() -> None:
    assert sorted(CONVERTERS) == list(range(FORMAT_VERSION))
    assert {format_of(path) for path in FORMATS.iterdir()} == set(CONVERTERS)


def test_an_old_log_is_read_told_and_replayed(tmp_path: Path) -> None:
    before = OLD.read_bytes()
    with pytest.raises(LogFormatError, match="format 0; this reader knows 1"):
        read_log(OLD)
    path = convert(OLD, tmp_path / "new")
    assert OLD.read_bytes() == before
    assert path == tmp_path / "new" / "old-1.0.kvlog"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    logs = open_logs([path.parent])
    assert logs.logs[0].header.info == {"converted": "0"}
    assert "took 96 tokens" in tell(logs, "second").sentence
    assert verify(logs).status == 0


def test_what_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    path = convert(OLD, tmp_path)
    with pytest.raises(FileExistsError):
        convert(OLD, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_torn_old_log_gives_what_it_has(tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    torn.write_bytes(OLD.read_bytes()[:-10])
    whole = len(list(read_log(convert(OLD, tmp_path / "a"))))
    assert len(list(read_log(convert(torn, tmp_path / "b")))) == whole - 1


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not an event log"),
        (b"kvflog\x00", "not an event log"),
        (b"kvflog\x01\x00", "present one"),
        (b"kvflog\x09\x00", "format 9; known are"),
        (b"kvflog\x00\x00", "header is broken"),
        (b"kvflog\x00\x00\xff\xff\xff\xff", "header is broken"),
        (b"kvflog\x00\x00" + frame({"side": "x"}), "header is broken"),
    ],
)
def test_what_cannot_be_converted_is_said(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(data)
    with pytest.raises(LogFormatError, match=text):
        convert(path, tmp_path / "out")
    out = tmp_path / "out"
    assert not out.exists() or list(out.iterdir()) == []


def test_a_name_cannot_lead_out_of_the_directory(tmp_path: Path) -> None:
    old = {"side": "worker", "name": "../evil", "pid": 1, "started_ns": 1, "config": {}}
    path = tmp_path / "bad"
    path.write_bytes(b"kvflog\x00\x00" + frame(old))
    with pytest.raises(LogFormatError, match="not a name"):
        convert(path, tmp_path / "out")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bad", "out"]
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(LogFormatError, match="not a regular file"):
        convert(tmp_path / "fifo", tmp_path / "out")
    with pytest.raises(LogFormatError, match="no such file"):
        convert(tmp_path / "none", tmp_path / "out")


def test_on_the_command_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["convert", str(OLD), "-o", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "old-1.0.kvlog")
    result = CliRunner().invoke(app, ["convert", str(OLD), "-o", str(tmp_path)])
    assert result.exit_code == 2
    result = CliRunner().invoke(app, ["convert", str(OLD), "-o", str(tmp_path / "2"), "--json"])
    assert json.loads(result.stdout)["new"] == str(tmp_path / "2" / "old-1.0.kvlog")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    write_format_0(OLD)
