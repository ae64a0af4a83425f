"""The recorder: numbers, causes, faults."""

from pathlib import Path

import msgspec
import pytest

from kvcommon.errors import LocalProtocolError
from kvcommon.eventlog import LogWriter, Recorder
from kvworker.core.commands import ProbeStore
from kvworker.core.events import ModelSaid
from tests.kvcommon.eventlog.logs import event, header, records


class Counting:
    """Answers the n-th event with n probes; refuses step 3; is invalid after step 4."""

    def __init__(self) -> None:
        self.count = 0

    def handle(self, event: ModelSaid) -> list[ProbeStore]:
        if event.body.step == 3:
            raise LocalProtocolError("three is not allowed")
        self.count += 1
        return [ProbeStore(op=n) for n in range(self.count)]

    def validate(self) -> None:
        assert self.count < 3, "too many"


def test_commands_pass_through_without_a_writer() -> None:
    recorder = Recorder(Counting(), None, "w-1")
    assert len(recorder.handle(event(1))) == 1
    assert len(recorder.handle(event(2), "s-1:4")) == 2
    assert recorder.stimulus == "w-1:2"


def test_events_are_numbered_and_recorded_with_causes_and_answers(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, header())
    recorder = Recorder(Counting(), writer, "w-1")
    recorder.handle(event(1))
    assert recorder.stimulus == "w-1:1"
    recorder.handle(event(2), "s-1:4")
    writer.close()
    first, second = records(writer.path)
    assert (first.seq, first.cause) == (1, "")
    assert (second.seq, second.cause) == (2, "s-1:4")
    assert msgspec.msgpack.decode(second.commands, type=list[ProbeStore]) == [
        ProbeStore(op=0),
        ProbeStore(op=1),
    ]


def test_a_fault_is_recorded_flushed_and_raised(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, header())
    recorder = Recorder(Counting(), writer, "w-1")
    with pytest.raises(LocalProtocolError, match="three"):
        recorder.handle(event(3), "s-1:1")
    (record,) = records(writer.path)
    writer.close()
    assert record.fault == "LocalProtocolError: three is not allowed"
    assert msgspec.msgpack.decode(record.commands) == []
    assert record.cause == "s-1:1"


@pytest.mark.parametrize("recorded", [True, False])
def test_invariants_are_checked_if_asked(tmp_path: Path, *, recorded: bool) -> None:
    writer = LogWriter(tmp_path, header()) if recorded else None
    recorder = Recorder(Counting(), writer, "w-1", validate=True)
    recorder.handle(event(1))
    recorder.handle(event(2))
    with pytest.raises(AssertionError, match="too many"):
        recorder.handle(event(4))
    if writer is not None:
        assert records(writer.path)[-1].fault.startswith("AssertionError: too many")
        writer.close()
