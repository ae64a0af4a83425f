"""A log is kept as its options say."""

from pathlib import Path

from kvcommon.eventlog import LogOptions, LogWriter, RingWriter, open_sink, read_log, redact_id
from kvsched.core.events import MatchAsked
from tests.kvcommon.eventlog.logs import header

ASKED = MatchAsked(now_ns=1, request_id="who", num_tokens=1, num_local_tokens=0)


def test_on_writes_at_once(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, header(), LogOptions())
    assert isinstance(sink, LogWriter)
    sink.record(1, "", ASKED, [])
    sink.close()
    assert b"who" in sink.path.read_bytes()


def test_redact_is_said_in_the_header(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, header(), LogOptions(redact=True))
    sink.record(1, "", ASKED, [])
    sink.close()
    assert isinstance(sink, LogWriter)
    assert read_log(sink.path).header.info["redacted"] == "ids"
    assert redact_id("who").encode() in sink.path.read_bytes()


def test_ring_writes_on_an_alarm(tmp_path: Path) -> None:
    options = LogOptions(mode="ring", ring_s=5, redact=True)
    sink = open_sink(tmp_path, header(), options, lambda _event, _commands: "always")
    assert isinstance(sink, RingWriter)
    sink.record(1, "", ASKED, [])
    sink.wait()
    assert sink.num_dumps == 1
    assert redact_id("who").encode() in (tmp_path / "w-1.0.kvlog").read_bytes()
