"""The command ``kvworker``: what people and service managers type.

Only what a command needs is imported, when it runs: ``serve`` must come up fast and small.
"""

import logging
import os
import sys
from typing import Annotated, NoReturn

import typer

from kvcommon import __version__
from kvworker.options import (
    Device,
    Direct,
    Endpoint,
    EventLog,
    EventLogCompress,
    EventLogMode,
    EventLogRedact,
    EventLogRing,
    Inject,
    LogLevel,
    LogLevelOption,
    LogMode,
    MemoryLimit,
    MetricsPort,
    MooncakeFile,
    NoWait,
    RunDir,
    Save,
    SaveMode,
    SaveNice,
    Store,
    StoreKind,
    Validate,
)

app = typer.Typer(
    name="kvworker",
    help="Moves vLLM's KV cache between a device and a store, from outside the model process.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

EXIT_USAGE = 2


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
    store: Store = StoreKind.MOONCAKE,
    mooncake_config: MooncakeFile = "",
    memory_limit: MemoryLimit = "1GiB",
    run_dir: RunDir = "",
    endpoint: Endpoint = "",
    event_log: EventLog = "",
    event_log_mode: EventLogMode = LogMode.ON,
    event_log_ring_s: EventLogRing = 30.0,
    event_log_redact: EventLogRedact = False,
    event_log_compress: EventLogCompress = False,
    validate: Validate = False,
    log_level: LogLevelOption = LogLevel.INFO,
    no_wait: NoWait = False,
    save: Save = SaveMode.AUTO,
    save_nice: SaveNice = 10,
    metrics_port: MetricsPort = None,
    direct: Direct = False,
    inject: Inject = "",
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
            direct=direct,
            inject=inject,
        )
    except ConfigError as error:
        _fail(str(error))
    run(
        config,
        wait_for_store=not no_wait,
        metrics_port=metrics_port,
        log_level=log_level.value,
    )


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def up(
    context: typer.Context,
    devices: Annotated[
        str, typer.Option(help="Devices to serve, for example npu:0-7 or cpu:0,cpu:1.")
    ],
    run_dir: RunDir = "",
) -> None:
    """Serve all devices of a node: restarts daemons that end. Other options go to `serve`."""
    from kvcommon.endpoints import run_dir as find_run_dir
    from kvcommon.errors import ConfigError
    from kvworker.supervisor import parse_devices
    from kvworker.supervisor import up as run

    try:
        chosen = parse_devices(devices, os.environ)
        directory = find_run_dir(run_dir)
    except ConfigError as error:
        _fail(str(error))
    run(chosen, ["--run-dir", str(directory), *context.args], directory)


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
def top(
    run_dir: RunDir = "",
    endpoint: Endpoint = "",
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")
    ] = 2.0,
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="End after so many looks; 0: at Ctrl-C.")
    ] = 0,
) -> None:
    """Watch the daemons of a run directory: what they move, find and fail, every few seconds."""
    from kvcommon.endpoints import run_dir as find_run_dir
    from kvcommon.errors import ConfigError
    from kvworker.top import find_endpoints, show

    try:
        endpoints = [endpoint] if endpoint else find_endpoints(find_run_dir(run_dir))
        show(endpoints, interval_s, rounds)
    except ConfigError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        return


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
    ] = 10.0,
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


@app.command()
def doctor(
    device: Device,
    store: Store = StoreKind.MOONCAKE,
    mooncake_config: MooncakeFile = "",
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Open neither card nor store; only look.")
    ] = False,
) -> None:
    """Check everything that serving a device needs, and say what to change."""
    from kvworker.doctor.examine import examine
    from kvworker.doctor.report import Surroundings, Verdict
    from kvworker.tables import print_findings

    findings = examine(
        Surroundings(device=device),
        mooncake=store is StoreKind.MOONCAKE,
        mooncake_file=mooncake_config,
        probe=not no_probe,
    )
    print_findings(findings)
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(1)


def _fail(message: str) -> NoReturn:
    """Say what is wrong in one line, and leave with the status for wrong usage."""
    typer.echo(f"kvworker: error: {message}", err=True)
    raise typer.Exit(EXIT_USAGE)


def main() -> None:
    """Run the command line."""
    logging.captureWarnings(capture=True)
    sys.exit(app())
