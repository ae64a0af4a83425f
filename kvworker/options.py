"""The options of ``kvworker``'s commands, with their help, in one place.

``serve`` and whatever starts it share them.
"""

import enum
from typing import Annotated, Optional

import typer


class SaveMode(str, enum.Enum):
    """Choices of ``--save``."""

    AUTO = "auto"
    LAYERWISE = "layerwise"


class StoreKind(str, enum.Enum):
    """Stores that a daemon can use."""

    MOONCAKE = "mooncake"
    MEMORY = "memory"


class LogMode(str, enum.Enum):
    """How an event log is kept."""

    ON = "on"
    RING = "ring"


class LogLevel(str, enum.Enum):
    """How much the daemon logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Device = Annotated[str, typer.Option(help="Device to serve, for example npu:3, cuda:0 or cpu:0.")]
RunDir = Annotated[
    str, typer.Option(help="Directory of the socket; default: KVFERRY_RUN_DIR or a private one.")
]
Endpoint = Annotated[str, typer.Option(help="ZeroMQ endpoint instead of <run dir>/<device>.sock.")]
Store = Annotated[StoreKind, typer.Option(help="Where KV is kept.")]
MooncakeFile = Annotated[
    str, typer.Option(help="Mooncake's JSON file; default: MOONCAKE_CONFIG_PATH.")
]
MemoryLimit = Annotated[str, typer.Option(help="Size of the memory store, for example 4GiB.")]
EventLog = Annotated[
    str, typer.Option(help="Directory for the event log (kvreplay reads it); empty: none.")
]
EventLogMode = Annotated[
    LogMode,
    typer.Option(help="ring: keep the log in memory; write it on a failure or `dump`."),
]
EventLogRing = Annotated[float, typer.Option(min=0.1, help="Seconds that a ring keeps.")]
EventLogRedact = Annotated[
    bool, typer.Option("--event-log-redact", help="Hash request ids in the log.")
]
EventLogCompress = Annotated[
    bool, typer.Option("--event-log-compress", help="Compress closed files of the log.")
]
Validate = Annotated[
    bool, typer.Option("--validate", help="Check every invariant after each event (slow).")
]
LogLevelOption = Annotated[LogLevel, typer.Option(help="What to log.")]
NoWait = Annotated[
    bool,
    typer.Option("--no-wait", help="Fail if the store is not there, instead of waiting."),
]
Save = Annotated[
    SaveMode,
    typer.Option(
        help="auto: copy whole blocks after the step where the store is this process's own "
        "memory, else layer by layer; layerwise: always layer by layer."
    ),
]
SaveNice = Annotated[int, typer.Option(min=0, max=19, help="Niceness of the saving thread.")]
Direct = Annotated[
    bool,
    typer.Option(
        "--direct",
        help="Accelerators: try to let the store read and write the engine's memory itself, "
        "without staging memory.",
    ),
]
Inject = Annotated[
    str,
    typer.Option(hidden=True, help="Plan of faults to rehearse: docs/failures.md."),
]
MetricsPort = Annotated[
    Optional[int],  # noqa: UP045 (typer reads annotations at run time on Python 3.10)
    typer.Option(min=0, max=65535, help="Serve Prometheus metrics on 127.0.0.1:PORT."),
]
