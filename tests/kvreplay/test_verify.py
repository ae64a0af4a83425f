"""Replaying into fresh cores, with cores small enough to see through."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcommon import messages as msg
from kvcommon.errors import LocalProtocolError
from kvcommon.eventlog import Dropped, LogWriter, Recorder, make_header
from kvcommon.eventlog.format import FRAME, checksum
from kvreplay.loading import LogSet, open_logs
from kvreplay.verify import AnyCore, Result, Verdict, verify
from kvsched.core.commands import AnswerMatch
from kvsched.core.core import CoreConfig, SchedCore
from kvsched.core.events import MatchAsked, RequestAdded, RequestFinished, SchedEvent, Ticked
from kvworker.core import events as work
from kvworker.core.core import CoreConfig as WorkerConfig
from kvworker.core.core import WorkerCore
from tests.kvreplay import scenes


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    offer: int


class Offering:
    """Offers so many tokens, one more each time; refuses requests called "bad"."""

    def __init__(self, settings: Settings) -> None:
        self.offer = settings.offer

    def handle(self, event: SchedEvent) -> list[AnswerMatch]:
        if not isinstance(event, MatchAsked):
            return []
        if event.request_id == "bad":
            raise LocalProtocolError("bad request")
        self.offer += 1
        return [AnswerMatch(request_id=event.request_id, num_tokens=self.offer)]

    def validate(self) -> None:
        if self.offer >= 1000:
            raise AssertionError(f"too generous\n{object()}")


def make(config: msgspec.Raw) -> AnyCore:
    return Offering(msgspec.msgpack.decode(config, type=Settings))


def make_other(config: msgspec.Raw) -> AnyCore:
    """The core of another version: from the third offer on it offers 100 more."""

    class Other(Offering):
        def handle(self, event: SchedEvent) -> list[AnswerMatch]:
            commands = super().handle(event)
            if commands and self.offer >= 13:
                return [AnswerMatch(request_id="r-1", num_tokens=self.offer + 100)]
            return commands

    return Other(msgspec.msgpack.decode(config, type=Settings))


def ask(request_id: str = "r-1") -> MatchAsked:
    return MatchAsked(now_ns=5, request_id=request_id, num_tokens=100, num_local_tokens=0)


def record(directory: Path, *events: SchedEvent, **sizes: Any) -> LogSet:
    header = make_header("kvsched", "s", 1, Settings(offer=10), versions={})
    writer = LogWriter(directory, header, **sizes)
    recorder = Recorder(Offering(Settings(offer=10)), writer, "s")
    for event in events:
        recorder.handle(event)
    writer.close()
    return open_logs([directory])


def check(logs: LogSet, *, other: bool = False) -> Verdict:
    return verify(logs, {"kvsched": make_other if other else make})


def test_the_same_core_answers_the_same(tmp_path: Path) -> None:
    verdict = check(record(tmp_path, ask(), Ticked(now_ns=6), ask(), ask()))
    (replay,) = verdict.replays
    assert (replay.result, replay.num_records) == (Result.SAME, 4)
    assert verdict.status == 0


def test_another_core_is_found_out_at_its_first_difference(tmp_path: Path) -> None:
    verdict = check(record(tmp_path, ask(), ask(), ask(), ask()), other=True)
    (replay,) = verdict.replays
    assert (replay.result, replay.seq, replay.num_records) == (Result.DIFFERENT, 3, 2)
    assert replay.expected == ["answers vLLM: 13 tokens to load"]
    assert replay.actual == ["answers vLLM: 113 tokens to load"]
    assert replay.request == "r-1"
    assert verdict.status == 1
    read = json.loads(json.dumps(verdict.plain()))
    assert read["replays"][0]["result"] == "different"
    assert read["replays"][0]["event"]["type"] == "MatchAsked"


def test_a_recorded_fault_is_expected_again(tmp_path: Path) -> None:
    header = make_header("kvsched", "s", 1, Settings(offer=10), versions={})
    writer = LogWriter(tmp_path, header)
    recorder = Recorder(Offering(Settings(offer=10)), writer, "s")
    recorder.handle(ask())
    with pytest.raises(LocalProtocolError):
        recorder.handle(ask("bad"))
    recorder.handle(ask())
    writer.close()
    verdict = check(open_logs([tmp_path]))
    assert verdict.status == 0
    assert verdict.replays[0].num_records == 3


def test_a_recorded_fault_that_does_not_come_again_is_a_difference(tmp_path: Path) -> None:
    header = make_header("kvsched", "s", 1, Settings(offer=10), versions={})
    writer = LogWriter(tmp_path, header)
    writer.record(1, "", ask(), (), "AssertionError: once")
    writer.close()
    (replay,) = check(open_logs([tmp_path])).replays
    assert replay.result is Result.DIFFERENT
    assert replay.expected == ["fails: AssertionError: once"]


def test_a_failed_invariant_is_found_again(tmp_path: Path) -> None:
    header = make_header("kvsched", "s", 1, Settings(offer=999), versions={})
    writer = LogWriter(tmp_path, header)
    recorder = Recorder(Offering(Settings(offer=999)), writer, "s", validate=True)
    with pytest.raises(AssertionError, match="too generous"):
        recorder.handle(ask())
    writer.close()
    assert check(open_logs([tmp_path])).replays[0].result is Result.SAME


def test_defaults_spelt_out_by_an_older_version_are_the_same(tmp_path: Path) -> None:
    class Spelt(msgspec.Struct, frozen=True, kw_only=True, tag="AnswerMatch"):
        request_id: str
        num_tokens: int
        asynchronous: bool = False
        reason: str = ""

    header = make_header("kvsched", "s", 1, Settings(offer=10), versions={})
    writer = LogWriter(tmp_path, header)
    writer.record(1, "", ask(), [Spelt(request_id="r-1", num_tokens=11)])
    writer.close()
    assert check(open_logs([tmp_path])).status == 0


def test_a_log_without_its_beginning_is_not_replayed_and_says_so(tmp_path: Path) -> None:
    events = [ask() for _ in range(60)]
    logs = record(tmp_path, *events, max_bytes=500, max_files=2, buffer_bytes=1)
    verdict = check(logs)
    (replay,) = verdict.replays
    assert replay.result is Result.NOT_REPLAYED
    assert "rotated away" in replay.why
    assert verdict.status == 2


def test_a_damaged_record_stops_the_replay_and_says_where(tmp_path: Path) -> None:
    record(tmp_path, *[ask() for _ in range(9)])
    path = tmp_path / "s.0.kvlog"
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + 100] ^= 1
    path.write_bytes(data)
    verdict = check(open_logs([tmp_path]))
    (replay,) = verdict.replays
    assert replay.result is Result.INCOMPLETE
    assert 0 < replay.num_records < 9
    assert "missing" in replay.why
    assert any("offset" in text for text in verdict.problems["s"])
    assert verdict.status == 2


def test_damage_at_the_very_end_is_not_all_is_well(tmp_path: Path) -> None:
    record(tmp_path, *[ask() for _ in range(9)])
    path = tmp_path / "s.0.kvlog"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    verdict = check(open_logs([tmp_path]))
    (replay,) = verdict.replays
    assert (replay.result, replay.num_records) == (Result.INCOMPLETE, 8)
    assert "behind record 8" in replay.why
    assert verdict.status == 2


def test_records_dropped_at_the_very_end_are_not_all_is_well(tmp_path: Path) -> None:
    record(tmp_path, ask(), ask())
    path = tmp_path / "s.0.kvlog"
    note = msgspec.msgpack.encode(Dropped(num_dropped=7, first_seq=3, last_seq=9))
    data = path.read_bytes()
    path.write_bytes(data + FRAME.pack(len(note), checksum(note, len(data))) + note)
    verdict = check(open_logs([tmp_path]))
    assert verdict.replays[0].result is Result.INCOMPLETE
    assert verdict.status == 2


def test_a_torn_end_is_normal(tmp_path: Path) -> None:
    record(tmp_path, ask(), ask(), ask())
    path = tmp_path / "s.0.kvlog"
    path.write_bytes(path.read_bytes()[:-5])
    verdict = check(open_logs([tmp_path]))
    assert verdict.status == 0
    assert verdict.replays[0].num_records == 2


def test_a_configuration_of_another_kind_is_not_replayed(tmp_path: Path) -> None:
    header = make_header("kvsched", "s", 1, scenes.Config(), versions={})
    LogWriter(tmp_path, header).close()
    verdict = check(open_logs([tmp_path]))
    assert "configuration" in verdict.replays[0].why
    assert verdict.status == 2


def test_a_broken_rule_is_found_even_if_the_core_is_consistent(tmp_path: Path) -> None:
    header = make_header("kvworker", "w", 1, Settings(offer=1), versions={})
    writer = LogWriter(tmp_path, header)
    writer.record(1, "", work.GetsClosed(now_ns=1, op=3), [])
    writer.close()
    verdict = verify(open_logs([tmp_path]), {"kvworker": make})
    assert verdict.replays[0].result is Result.SAME
    assert verdict.judgement.violations
    assert verdict.status == 1


def test_the_real_cores_replay_what_they_answered(tmp_path: Path) -> None:
    sched_config = CoreConfig()
    header = make_header("kvsched", "s", 1, sched_config, versions={})
    writer = LogWriter(tmp_path, header)
    core = Recorder(SchedCore(sched_config), writer, "s")
    core.handle(
        RequestAdded(now_ns=1, request_id="r-1", num_tokens=100, block_hashes=tuple(scenes.HASHES))
    )
    answers = core.handle(ask())
    core.handle(RequestFinished(now_ns=9, request_id="r-1"))
    writer.close()
    worker_config = WorkerConfig(device="cpu:0", store="memory")
    header = make_header("kvworker", "w", 2, worker_config, versions={})
    writer = LogWriter(tmp_path, header)
    daemon = Recorder(WorkerCore(worker_config), writer, "w")
    hello = msg.Hello(pid=1, ranks=(), open_jobs=(4,))
    said = daemon.handle(work.SchedulerSaid(now_ns=1, engine="e#0", epoch=1, body=hello))
    daemon.handle(work.Ticked(now_ns=10_000_000_000))
    writer.close()
    assert answers
    assert said
    verdict = verify(open_logs([tmp_path]))
    assert [(one.result, one.num_records) for one in verdict.replays] == [
        (Result.SAME, 3),
        (Result.SAME, 2),
    ], verdict.plain()
    assert verdict.status == 0, verdict.plain()
