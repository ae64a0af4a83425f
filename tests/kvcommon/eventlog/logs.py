"""Small logs for the tests of this folder."""

from pathlib import Path

import msgspec

from kvcommon.eventlog import LogHeader, LogWriter, RawRecord, make_header, read_log
from kvcommon.messages import LayersComputed
from kvworker.core.commands import ProbeStore
from kvworker.core.events import ModelSaid


class Config(msgspec.Struct, frozen=True, kw_only=True):
    width: int = 1


def header(name: str = "w-1") -> LogHeader:
    return make_header("kvworker", name, 7, Config(), versions={"kvferry": "0"})


def event(seq: int, filler: str = "") -> ModelSaid:
    return ModelSaid(
        now_ns=seq * 1000,
        engine=f"engine{filler}#0",
        epoch=3,
        body=LayersComputed(step=seq, num_layers=4),
    )


def write(directory: Path, count: int, name: str = "w-1") -> Path:
    """Write records 1 … count and return the file."""
    writer = LogWriter(directory, header(name))
    for seq in range(1, count + 1):
        writer.record(seq, f"s-1:{seq}", event(seq), [ProbeStore(op=seq)])
    writer.close()
    return writer.path


def records(path: Path) -> list[RawRecord]:
    return list(read_log(path))
