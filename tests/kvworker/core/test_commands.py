"""Commands are plain data: what is logged is what was said."""

from typing import get_args

import msgspec
import pytest

from kvcommon.messages import JobEnd, JobOutcome, JobsEnded
from kvworker.core.commands import Cancel, ClosePuts, LoadLayers, SendToModel, WorkerCommand

COMMANDS: list[WorkerCommand] = [
    Cancel(op=1),
    ClosePuts(op=2, engine="e#0", step=3, end=("a",), revoke=("b",)),
    LoadLayers(
        op=3,
        engine="e#0",
        step=3,
        group=0,
        keys=("a",),
        block_ids=(4,),
        first_layer=0,
        end_layer=2,
        publish=True,
    ),
    SendToModel(engine="e#0", body=JobsEnded(ends=(JobEnd(job_id=1, outcome=JobOutcome.SKIPPED),))),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_survives_the_log(command: WorkerCommand) -> None:
    encoded = msgspec.msgpack.encode(command)
    assert msgspec.msgpack.decode(encoded, type=WorkerCommand) == command


def test_commands_cannot_be_changed() -> None:
    for kind in get_args(WorkerCommand):
        assert kind.__struct_config__.frozen, kind
        assert kind.__struct_config__.tag == kind.__name__, kind
