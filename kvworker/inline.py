"""Inline mode: the same daemon in a thread of the model process.

The fallback where memory cannot be shared, and the honest baseline for the daemon mode. The only
place where the two sides of kvferry meet, through the entry point ``kvferry.inline``.
"""

import atexit
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import zmq

from kvcommon.config import DaemonConfig
from kvworker.shell import CLOSE_DEADLINE_S, Daemon

logger = logging.getLogger("kvferry.worker")


class InlineDaemon:
    """A serving daemon in a thread. Any thread may use this handle."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="kvworker", daemon=True)

    @property
    def endpoint(self) -> str:
        """Where other processes reach it."""
        return self._daemon.endpoint

    @property
    def is_serving(self) -> bool:
        """It was started and has neither been stopped nor failed."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread and wait until it serves.

        Raises:
            ConfigError, StoreError, HandleError: as ``Daemon.start``; nothing is left behind.
        """
        self._thread.start()
        self._started.result()
        # The interpreter kills threads at exit; the socket file must be gone before.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop serving and wait, bounded. Idempotent."""
        atexit.unregister(self.stop)
        self._daemon.stop()
        self._thread.join(2 * CLOSE_DEADLINE_S)

    def _run(self) -> None:
        try:
            self._daemon.start()
        except BaseException as error:  # noqa: BLE001 (handed to the thread that waits for it)
            self._daemon.close()
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            self._daemon.serve()
        except Exception:
            logger.exception("the inline daemon has ended; the engine serves on without the cache")
        finally:
            self._daemon.close()


def start(
    config: DaemonConfig,
    *,
    context: "zmq.Context[zmq.Socket[bytes]]",
    endpoints: Sequence[str],
) -> InlineDaemon:
    """Serve ``config.endpoint`` and ``endpoints`` (``inproc://`` of ``context``) from a thread.

    Raises:
        ConfigError, StoreError, HandleError: it cannot serve.
    """
    handle = InlineDaemon(Daemon(config, context=context, extra_endpoints=endpoints))
    handle.start()
    return handle
