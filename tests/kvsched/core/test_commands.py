import msgspec
import pytest

from kvcommon.messages import StepVerdict
from kvsched.core.commands import (
    AnswerMatch,
    FreeBlocks,
    HoldBlocks,
    ModelLoad,
    SchedCommand,
    SendToDaemon,
    TellModel,
)

COMMANDS: list[SchedCommand] = [
    AnswerMatch(request_id="a", num_tokens=None),
    HoldBlocks(job_id=1, block_ids=(1, 2)),
    FreeBlocks(job_id=1, block_ids=(1, 2)),
    SendToDaemon(rank=0, body=StepVerdict(step=1, tainted=(1,))),
    TellModel(
        step=1,
        loads=(ModelLoad(job_id=1, request_id="a", layerwise=True, block_ids=(1,)),),
        cancel=(2,),
    ),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_survives_the_log(command: SchedCommand) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=SchedCommand) == command
