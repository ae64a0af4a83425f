"""The daemon: one thread that owns the socket and the core, and what it needs around it.

``start`` does everything that can fail because of the user, in an order that leaves nothing
behind; ``serve`` loops until ``stop``; ``close`` gives everything back. Work that may block (store
calls, copies, mappings) is done by the executor's threads, whose answers come through the inbox.

A fault of the core ends ``serve`` with its exception: the supervisor restarts the process, and
engines see a new epoch.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from kvcommon import __version__
from kvcommon.config import DaemonConfig
from kvcommon.endpoints import EndpointLock, check_endpoint, daemon_endpoint, run_dir
from kvcommon.ids import new_epoch
from kvcommon.messages import PROTOCOL_VERSION, Status
from kvworker.assembly import Machinery, assemble, opening_store
from kvworker.conversations import Asked, Conversations
from kvworker.descriptor import Descriptor, descriptor_path, write_descriptor
from kvworker.devices.factory import make_device
from kvworker.inbox import Inbox
from kvworker.liveness import ProcessWatch
from kvworker.loop import Loop
from kvworker.router import Router
from kvworker.status import describe

if TYPE_CHECKING:
    from kvworker.metrics import MetricsServer

logger = logging.getLogger("kvferry.worker")

#: How long ``start`` waits for the store before it serves without it.
_STORE_WAIT_S = 2.0
#: How long it waits for a store without which it may not serve.
_STORE_LIMIT_S = 60.0
#: How long ``close`` waits for threads and the store. A frozen Mooncake master blocks for 30 s.
CLOSE_DEADLINE_S = 5.0
_IPC = "ipc://"


class Daemon:
    """One daemon. ``start``, ``serve`` and ``close`` belong to one thread; ``stop`` to any."""

    def __init__(
        self,
        config: DaemonConfig,
        *,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
        extra_endpoints: Sequence[str] = (),
        metrics_port: int | None = None,
    ) -> None:
        """Remember the configuration.

        Args:
            config: Checked settings.
            context: ZeroMQ context to share (``inproc://``); None: one of its own.
            extra_endpoints: Served beside the configured one.
            metrics_port: Loopback port for Prometheus; 0: any; None: none.
        """
        self.config = config
        self.epoch = new_epoch()
        #: What clients connect to; set by ``start``.
        self.endpoint = config.endpoint
        self._extra_endpoints = tuple(extra_endpoints)
        self._context = context
        self._metrics_port = metrics_port
        self._metrics: MetricsServer | None = None
        self._undo = contextlib.ExitStack()
        self._inbox = Inbox()
        self._poller = zmq.Poller()
        self._watch = ProcessWatch(self._poller)
        self._talk: Conversations | None = None
        self._machinery: Machinery | None = None
        #: A plain flag: a lock in it could deadlock a signal handler.
        self._stopping = False
        self._loop: Loop | None = None
        self._started_ns = time.monotonic_ns()

    def start(self, *, wait_for_store: bool = True) -> None:
        """Take the endpoint, open the store, bind. After an error, call ``close``.

        Args:
            wait_for_store: Serve without a store that cannot be reached yet; False: that is an
                error.

        Raises:
            ConfigError, StoreError, HandleError: one line about what to change.
        """
        config = self.config
        directory = run_dir(config.run_dir)
        self.endpoint = (
            check_endpoint(config.endpoint)
            if config.endpoint
            else daemon_endpoint(directory, config.device)
        )
        if self.endpoint.startswith(_IPC):
            path = Path(self.endpoint[len(_IPC) :])
            lock = EndpointLock()
            lock.acquire(path)
            self._undo.callback(lock.release)
            # libzmq leaves the file of a closed socket behind.
            self._undo.callback(path.unlink, missing_ok=True)
        device = make_device(config.device)
        if config.inject:
            from kvworker.devices.faults import faulty_device
            from kvworker.faults import read_plan

            device = faulty_device(device, read_plan(config.inject))
        store = opening_store(config, self.stop, device)
        machinery = assemble(config, self.epoch, device, store, self._inbox.post)
        self._machinery = machinery
        store.open(once=not wait_for_store)
        store.wait(_STORE_WAIT_S if wait_for_store else _STORE_LIMIT_S, required=not wait_for_store)
        context = self._context
        if context is None:
            context = zmq.Context()
            self._undo.callback(context.term)
        router = Router(context)
        self._undo.callback(router.close)
        router.bind([self.endpoint, *self._extra_endpoints])
        self._talk = Conversations(router, self.epoch)
        self._loop = Loop(self._talk, machinery, self._watch, self._inbox, config.heartbeat_ms)
        self._poller.register(router.socket, zmq.POLLIN)
        self._poller.register(self._inbox.fileno(), zmq.POLLIN)
        if self._metrics_port is not None:
            from kvworker.metrics import MetricsServer

            self._metrics = MetricsServer()
            self._undo.callback(self._metrics.close)
            self._metrics.start(self._metrics_port)
        path = descriptor_path(directory, config.device, self.endpoint)
        self._undo.callback(path.unlink, missing_ok=True)
        write_descriptor(path, self._descriptor())
        logger.info(
            "ready: %s serves %s with store %s (pid %d)",
            config.device,
            self.endpoint,
            store.name,
            os.getpid(),
        )

    def serve(self) -> None:
        """Serve until ``stop``.

        Raises:
            StoreError, ConfigError: the store turned out to be unusable.
            Exception: a fault of ours; where it happened is logged, the caller logs what.
        """
        machinery, loop, talk = self._machinery, self._loop, self._talk
        assert machinery is not None
        assert loop is not None
        assert talk is not None

        def status() -> Status:
            uptime_ns = loop.now_ns - self._started_ns
            return describe(self.config, self.endpoint, uptime_ns, machinery, talk)

        def answer(asked: Asked) -> None:
            talk.answer(asked, status())

        try:
            while not self._stopping:
                ready = self._poller.poll(loop.wait_ms)
                ticked = loop.turn([fd for fd, _ in ready if isinstance(fd, int)], answer)
                if ticked and self._metrics is not None:
                    self._metrics.show(status().metrics)
        except Exception:
            logger.critical(
                "the daemon has a fault and ends (at %s, event log in %s)",
                machinery.recorder.stimulus,
                self.config.event_log or "no place: it keeps none",
            )
            raise
        if machinery.store.error is not None:
            raise machinery.store.error

    def stop(self) -> None:
        """Make ``serve`` return. Any thread; safe in a signal handler; idempotent."""
        self._stopping = True
        self._inbox.wake()

    def close(self) -> bool:
        """Give everything back: first what others see, then threads and store. Idempotent.

        Returns:
            False if a thread or the store did not end in time: the process should leave by
            ``os._exit``.
        """
        self._undo.close()
        self._watch.close()
        machinery, self._machinery = self._machinery, None
        ended = True
        if machinery is not None:
            closer = threading.Thread(target=_close, args=(machinery,), name="close", daemon=True)
            closer.start()
            closer.join(CLOSE_DEADLINE_S)
            ended = not closer.is_alive()
            if not ended:
                logger.error("a transfer or the store did not end within %.0f s", CLOSE_DEADLINE_S)
            if machinery.writer is not None:
                machinery.writer.close()
        if ended:
            # A thread left behind may still post; its descriptor must not become another file's.
            self._inbox.close()
        return ended

    def _descriptor(self) -> Descriptor:
        return Descriptor(
            device=self.config.device,
            pid=os.getpid(),
            epoch=f"{self.epoch:x}",
            endpoint=self.endpoint,
            version=__version__,
            protocol=PROTOCOL_VERSION,
        )


def _close(machinery: Machinery) -> None:
    machinery.executor.close(CLOSE_DEADLINE_S / 2)
    machinery.store.close()
