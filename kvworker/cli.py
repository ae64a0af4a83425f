"""The command ``kvworker``: what people and service managers type.

Only what a command needs is imported, when it runs: ``serve`` must come up fast and small.
"""

import enum
import logging
import sys
from typing import Annotated, NoReturn, Optional

import typer

from kvcommon import __version__

app = typer.Typer(
    name="kvworker",
    help="Moves vLLM's KV cache between a device and a store, from outside the model process.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

EXIT_USAGE = 2


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


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvferry {__version__}")
        raise typer.Exit


@app.callback()
def common(
    _version_wanted: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def serve(  # noqa: PLR0917 (typer passes them by name)
    device: Device,
    store: Annotated[StoreKind, typer.Option(help="Where KV is kept.")] = StoreKind.MOONCAKE,
    mooncake_config: Annotated[
        str, typer.Option(help="Mooncake's JSON file; default: MOONCAKE_CONFIG_PATH.")
    ] = "",
    memory_limit: Annotated[
        str, typer.Option(help="Size of the memory store, for example 4GiB.")
    ] = "1GiB",
    run_dir: RunDir = "",
    endpoint: Endpoint = "",
    event_log: Annotated[
        str, typer.Option(help="Directory for the event log (kvreplay reads it); empty: none.")
    ] = "",
    event_log_mode: Annotated[
        LogMode,
        typer.Option(help="ring: keep the log in memory; write it on a failure or `dump`."),
    ] = LogMode.ON,
    event_log_ring_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a ring keeps.")
    ] = 30.0,
    event_log_redact: Annotated[
        bool, typer.Option("--event-log-redact", help="Hash request ids in the log.")
    ] = False,
    event_log_compress: Annotated[
        bool, typer.Option("--event-log-compress", help="Compress closed files of the log.")
    ] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Check every invariant after each event (slow).")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="What to log.")] = LogLevel.INFO,
    no_wait: Annotated[
        bool,
        typer.Option("--no-wait", help="Fail if the store is not there, instead of waiting."),
    ] = False,
    save: Annotated[
        SaveMode,
        typer.Option(
            help="auto: copy whole blocks after the step where the store is this process's own "
            "memory, else layer by layer; layerwise: always layer by layer."
        ),
    ] = SaveMode.AUTO,
    save_nice: Annotated[
        int, typer.Option(min=0, max=19, help="Niceness of the saving thread.")
    ] = 10,
    metrics_port: Annotated[
        Optional[int],  # noqa: UP045 (typer reads annotations at run time on Python 3.10)
        typer.Option(min=0, max=65535, help="Serve Prometheus metrics on 127.0.0.1:PORT."),
    ] = None,
) -> None:
    """Serve one device until SIGTERM."""
    from kvcommon.config import DaemonConfig
    from kvcommon.errors import ConfigError
    from kvcommon.sizes import parse_size
    from kvworker.serve import serve as run

    try:
        config = DaemonConfig(
            device=device,
            store=store.value,
            mooncake_config=mooncake_config,
            memory_limit=parse_size(memory_limit),
            run_dir=run_dir,
            endpoint=endpoint,
            event_log=event_log,
            event_log_mode=event_log_mode.value,
            event_log_ring_s=event_log_ring_s,
            event_log_redact=event_log_redact,
            event_log_compress=event_log_compress,
            validate=validate,
            save=save.value,
            save_nice=save_nice,
        )
    except ConfigError as error:
        _fail(str(error))
    run(
        config,
        wait_for_store=not no_wait,
        metrics_port=metrics_port,
        log_level=log_level.value,
    )


@app.command()
def status(
    device: Device = "",
    run_dir: RunDir = "",
    endpoint: Endpoint = "",
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer.")
    ] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how a daemon is."""
    import msgspec

    from kvcommon.endpoints import daemon_endpoint
    from kvcommon.endpoints import run_dir as find_run_dir
    from kvcommon.errors import ConfigError
    from kvworker.ask import ask_status

    if not endpoint and not device:
        _fail("say which daemon: --device (for example cpu:0) or --endpoint")
    try:
        answer = ask_status(endpoint or daemon_endpoint(find_run_dir(run_dir), device), timeout_s)
    except ConfigError as error:
        _fail(str(error))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)))
        return
    from kvworker.tables import print_status

    print_status(answer)


@app.command()
def dump(
    device: Device = "",
    run_dir: RunDir = "",
    endpoint: Endpoint = "",
    directory: Annotated[
        str, typer.Option("--event-log", help="Directory of the logs; default: ask the daemon.")
    ] = "",
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the files.")
    ] = 3.0,
) -> None:
    """Write event logs that are kept in memory (ring), of the daemon and the engines beside it."""
    from kvcommon.endpoints import daemon_endpoint
    from kvcommon.endpoints import run_dir as find_run_dir
    from kvcommon.errors import ConfigError
    from kvworker.ask import ask_status
    from kvworker.dump import write_logs

    if not endpoint and not device and not directory:
        _fail("say which daemon: --device (for example cpu:0), --endpoint or --event-log")
    try:
        if not directory:
            place = endpoint or daemon_endpoint(find_run_dir(run_dir), device)
            directory = ask_status(place, timeout_s).event_log
        found = write_logs(directory, timeout_s)
    except ConfigError as error:
        _fail(str(error))
    for path in found:
        typer.echo(path)


def _fail(message: str) -> NoReturn:
    """Say what is wrong in one line, and leave with the status for wrong usage."""
    typer.echo(f"kvworker: error: {message}", err=True)
    raise typer.Exit(EXIT_USAGE)


def main() -> None:
    """Run the command line."""
    logging.captureWarnings(capture=True)
    sys.exit(app())
