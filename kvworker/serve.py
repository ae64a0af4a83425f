"""``kvworker serve``: one daemon as the whole of its process.

SIGUSR1 asks every event log of the directory that is kept in memory to be written.
Exit status: 0 after SIGTERM, SIGINT or SIGHUP, 2 for anything the user must change, 1 for a fault
of ours (the supervisor restarts it).
"""

import contextlib
import faulthandler
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kvcommon.config import DaemonConfig
from kvcommon.errors import ConfigError, HandleError, StoreError
from kvcommon.eventlog import ask_for_dumps
from kvworker.shell import CLOSE_DEADLINE_S, Daemon

logger = logging.getLogger("kvferry.worker")

EXIT_OK, EXIT_FAULT, EXIT_USAGE = 0, 1, 2


def serve(
    config: DaemonConfig,
    *,
    wait_for_store: bool = True,
    metrics_port: int | None = None,
    log_level: str = "info",
) -> NoReturn:
    """Serve until a signal says stop, then leave the process."""
    logging.basicConfig(
        level=log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    _raise_file_limit()
    daemon = Daemon(config, metrics_port=metrics_port)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # nohup: a terminal that is closed does not end us.
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _stopper(daemon))
    signal.signal(signal.SIGUSR1, _dumper(config.event_log))
    code = EXIT_OK
    try:
        daemon.start(wait_for_store=wait_for_store)
        daemon.serve()
    except (ConfigError, StoreError, HandleError) as error:
        sys.stderr.write(f"kvworker: error: {error}\n")
        code = EXIT_USAGE
    except Exception:
        logger.exception("ended by a fault of ours; please report it with the event log")
        code = EXIT_FAULT
    arm()
    daemon.close()
    logger.info("stopped")
    logging.shutdown()
    sys.stderr.flush()
    # Everything is given back. The interpreter would wait for a thread that is still in the store
    # client, and Mooncake's own clean-up at exit aborts the process if its master is frozen.
    os._exit(code)


def arm() -> None:
    """End the process even if closing blocks the interpreter itself.

    Mooncake's ``close`` holds the GIL, for 30 s if the master is frozen; this watchdog needs none.
    """
    faulthandler.dump_traceback_later(2 * CLOSE_DEADLINE_S, exit=True)


def _raise_file_limit() -> None:
    """Allow as many descriptors as we may: libzmq ends the process when there are none left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _dumper(directory: str) -> Callable[[int, FrameType | None], None]:
    def handle(_signum: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            if directory:
                ask_for_dumps(Path(directory))

    return handle


def _stopper(daemon: Daemon) -> Callable[[int, FrameType | None], None]:
    def handle(signum: int, _frame: FrameType | None) -> None:
        logger.info("stopping: %s", signal.Signals(signum).name)
        daemon.stop()

    return handle
