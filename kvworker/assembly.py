"""Putting a daemon together from its configuration: store, core, event log, executor.

The one place that knows which implementations exist (devices have their own factory).
"""

import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvcommon import __version__
from kvcommon.config import DaemonConfig, mooncake_config
from kvcommon.eventlog import LogSink, Recorder, make_header, open_sink
from kvcommon.sizes import parse_size
from kvworker.alarm import alarm
from kvworker.core.commands import WorkerCommand
from kvworker.core.core import CoreConfig, WorkerCore
from kvworker.core.events import WorkerEvent
from kvworker.devices.base import Device
from kvworker.stores.base import Store
from kvworker.stores.opening import OpeningStore
from kvworker.transfer.executor import Executor

logger = logging.getLogger("kvferry.worker")

#: Seconds before the store is tried again: quickly at first, then calmly.
_RETRY_S = (0.5, 1.0, 2.0, 4.0)
#: Retries of many daemons must not come at once: each stretches its waits by up to this much.
_JITTER = 0.5


class Machinery(NamedTuple):
    """What does the daemon's work."""

    store: OpeningStore
    core: WorkerCore
    recorder: "Recorder[WorkerEvent, WorkerCommand]"
    writer: LogSink | None
    executor: Executor


def make_store(config: DaemonConfig, device: Device | None = None) -> Store:
    """Make the configured store, not open yet.

    Raises:
        ConfigError: unusable settings.
    """
    if config.store == "memory":
        from kvworker.stores.memory import MemoryStore

        return MemoryStore(parse_size(config.memory_limit))
    from kvworker.stores.mooncake import MooncakeStore

    return MooncakeStore(
        mooncake_config(config.mooncake_config or None, os.environ),
        save_nice=config.save_nice,
        bind=None if device is None or device.direct else device.bind_thread,
    )


def opening_store(
    config: DaemonConfig, failed: Callable[[], None], device: Device | None = None
) -> OpeningStore:
    """Make the configured store with its waiting; ``failed`` as in ``OpeningStore``."""
    stretch = 1 + _JITTER * int.from_bytes(os.urandom(2), "big") / 0xFFFF
    store = make_store(config, device)
    if config.inject:
        from kvworker.faults import read_plan
        from kvworker.stores.faults import faulty_store

        store = faulty_store(store, read_plan(config.inject))
        logger.warning("faults are injected into the store as %s says", config.inject)
    return OpeningStore(
        store, retry_s=[stretch * delay for delay in _RETRY_S], failed=failed
    )


def assemble(
    config: DaemonConfig,
    epoch: int,
    device: Device,
    store: OpeningStore,
    post: Callable[[WorkerEvent], None],
) -> Machinery:
    """Make the core, its log and the executor.

    Raises:
        ConfigError: the event log cannot be written.
    """
    name = f"kvworker-{config.device.replace(':', '-')}-{epoch & 0xFFFFFFFF:08x}"
    log = str(Path(config.event_log).resolve()) if config.event_log else ""
    core_config = CoreConfig(
        device=config.device,
        store=store.name,
        pid=os.getpid(),
        event_log=log,
        validate=config.validate,
    )
    writer = None
    if log:
        header = make_header(
            "kvworker",
            name,
            epoch,
            core_config,
            versions={"kvferry": __version__, "python": platform.python_version()},
            info={"device": config.device, "store": store.name},
        )
        writer = open_sink(Path(log), header, config.log_options, alarm)
    core = WorkerCore(core_config)
    recorder = Recorder[WorkerEvent, WorkerCommand](core, writer, name, validate=config.validate)
    executor = Executor(
        device,
        store,
        post,
        time.monotonic_ns,
        save_nice=config.save_nice,
        save_layerwise=config.save == "layerwise",
        try_direct=config.direct,
    )
    return Machinery(store, core, recorder, writer, executor)
