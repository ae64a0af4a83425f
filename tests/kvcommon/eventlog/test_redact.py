"""Hashing request ids: all of them, nothing else, and replay does not notice."""

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from kvcommon.errors import LocalProtocolError
from kvcommon.eventlog import LogWriter, Recorder, make_header, read_log, redact_id
from kvcommon.eventlog.redact import _ID_FIELDS, redact, redact_fault
from kvcommon.messages import LoadJob, StepPlan
from kvreplay.loading import open_logs
from kvreplay.verify import verify
from kvsched.core.commands import SchedCommand
from kvsched.core.core import SchedCore
from kvsched.core.events import (
    BlocksAllocated,
    MatchAsked,
    RequestFinished,
    SchedEvent,
    StepScheduled,
)
from kvworker.core.commands import WorkerCommand
from kvworker.core.events import SchedulerSaid, WorkerEvent
from tests.support import schedplay


def test_an_id_has_one_hash_and_another_id_another() -> None:
    assert redact_id("chatcmpl-1") == redact_id("chatcmpl-1")
    assert redact_id("chatcmpl-1") != redact_id("chatcmpl-2")
    assert re.fullmatch(r"r-[0-9a-f]{16}", redact_id("x"))


def test_ids_are_found_at_any_depth() -> None:
    job = LoadJob(
        job_id=1, request_id="a", group=0, block_ids=(5,), block_hashes=(b"h",), layerwise=True
    )
    said = SchedulerSaid(now_ns=1, engine="e#0", epoch=1, body=StepPlan(step=3, loads=(job,)))
    plan = redact(said).body
    assert plan.loads[0] == msgspec.structs.replace(job, request_id=redact_id("a"))
    event = StepScheduled(now_ns=1, step=2, preempted=("a", "b"))
    assert redact(event).preempted == (redact_id("a"), redact_id("b"))


def test_what_has_no_id_is_returned_as_it_is() -> None:
    said = SchedulerSaid(now_ns=1, engine="e#0", epoch=1, body=StepPlan(step=3))
    assert redact(said) is said


def structs_of(kind: Any, seen: set[type]) -> None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
        seen.add(kind)
        for field in msgspec.structs.fields(kind):
            structs_of(field.type, seen)
    for inner in get_args(kind):
        structs_of(inner, seen)


def test_every_field_that_holds_request_ids_is_known() -> None:
    seen: set[type] = set()
    for union in (SchedEvent, SchedCommand, WorkerEvent, WorkerCommand):
        structs_of(union, seen)
    assert len(seen) > 40
    named = {
        field.name
        for kind in seen
        for field in msgspec.structs.fields(kind)
        if "request" in field.name and field.type in {str, tuple[str, ...]}
    }
    assert named | {"preempted"} == set(_ID_FIELDS)


def test_a_fault_keeps_its_type_only() -> None:
    assert redact_fault("") == ""
    assert redact_fault("LocalProtocolError: req-7 is unknown") == "LocalProtocolError: redacted"


def test_a_redacted_log_holds_no_id_and_replays(tmp_path: Path) -> None:
    play = schedplay.Play(sync_is_safe=True)
    header = make_header("kvsched", "s", 1, play.config, versions={})
    writer = LogWriter(tmp_path, header, redacted=True)
    core = Recorder(SchedCore(play.config), writer, "s")
    play.admit("secret-name", 100, 4, range(1, 8))
    play.finish("secret-name")
    for event, _ in play.story:
        core.handle(event)
    bad = BlocksAllocated(
        now_ns=2**40, request_id="bad-secret", block_ids=(1,), num_external_tokens=16
    )
    with pytest.raises(LocalProtocolError, match="bad-secret"):
        core.handle(bad)
    writer.close()
    assert b"secret" not in writer.path.read_bytes()
    assert len(list(read_log(writer.path))) == len(play.story) + 1
    assert verify(open_logs([tmp_path])).status == 0


def test_messages_about_requests_are_redacted_in_events() -> None:
    event = MatchAsked(now_ns=1, request_id="r", num_tokens=1, num_local_tokens=0)
    assert redact(event).request_id == redact_id("r")
    assert redact([RequestFinished(now_ns=1, request_id="r")])[0].request_id == redact_id("r")
