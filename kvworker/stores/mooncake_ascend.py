"""Mooncake's transport ``ascend``: a transfer engine of ours, on the daemon's card.

With that transport the store's client does not make its own engine in the way that serves us: it
would take memory for host memory where it does not recognise it, and it would be made by whatever
thread calls. So the engine is made here, on a thread that has the card's context, and memory is
registered with it, each region once and with its place named. Fabric memory (Atlas A3) is the
exception: the library then makes the engine, and nothing is registered at all.

Threading: any thread; each call gives its thread the card's context first.
"""

import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from kvcommon.config import MooncakeConfig
from kvcommon.errors import ConfigError, StoreError

_logger = logging.getLogger("kvferry.worker")

#: Mooncake's transport between NPUs.
PROTOCOL = "ascend"
#: Its mere presence switches fabric memory on in the library, whatever its value.
FABRIC = "ASCEND_ENABLE_USE_FABRIC_MEM"
#: Time-outs of the transport, ms, and what the library takes where they are not set. Ours are
#: shorter than a lease: a transfer that outlives its lease may read what was given to others.
TIMEOUTS = ("ASCEND_CONNECT_TIMEOUT", "ASCEND_TRANSFER_TIMEOUT")
LIBRARY_TIMEOUT_MS = 10_000
OUR_TIMEOUT_MS = "3000"
#: Regions that one process may register.
MAX_REGISTRATIONS = 256
#: Alignment of device memory that moves over HCCS.
_HUGE = 2 << 20
_GIB = 1 << 30


def timeout_ms(environ: Mapping[str, str]) -> int:
    """The longest that a transfer may take."""
    given = [environ.get(name, "") for name in TIMEOUTS]
    return max(int(text) if text.isdecimal() else LIBRARY_TIMEOUT_MS for text in given)


def uses_fabric(environ: Mapping[str, str]) -> bool:
    """Tell whether fabric memory is wanted."""
    return environ.get(FABRIC) == "1"


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Say what the library would otherwise take from its defaults, and undo its trap."""
    for name in TIMEOUTS:
        environ.setdefault(name, OUR_TIMEOUT_MS)
    if FABRIC in environ and not uses_fabric(environ):
        _logger.warning(
            "%s=%s would switch fabric memory on: its value does not count. Taken out of the "
            "environment; set it to 1 if fabric memory is what you want",
            FABRIC,
            environ[FABRIC],
        )
        del environ[FABRIC]


def check(config: MooncakeConfig, environ: Mapping[str, str]) -> None:
    """Refuse a configuration that would lose data or fail later.

    Raises:
        StoreError: says what to change.
    """
    if config.store_lease_ms <= timeout_ms(environ):
        raise StoreError(
            f"store_lease_ms is {config.store_lease_ms} and a transfer may take "
            f"{timeout_ms(environ)} ms: start mooncake_master with --default_kv_lease_ttl 11000 or "
            f"more and set store_lease_ms to it, or lower {' and '.join(TIMEOUTS)}"
        )
    if uses_fabric(environ) and config.global_segment_size % _GIB:
        raise StoreError(
            f"global_segment_size is {config.global_segment_size}; with fabric memory it must be a "
            "multiple of 1 GiB"
        )


def make_engine(config: MooncakeConfig, bind: Callable[[], None] | None) -> "AscendEngine | None":
    """Make the engine of a store, not open yet; None if its protocol needs none of ours.

    Raises:
        ConfigError: the protocol is for NPUs, and the daemon serves none.
    """
    if config.protocol != PROTOCOL:
        return None
    if bind is None:
        raise ConfigError(
            f"protocol {PROTOCOL!r} of the Mooncake configuration is for daemons of NPUs (--device "
            "npu:<n>); elsewhere it is tcp or rdma"
        )
    return AscendEngine(bind)


class AscendEngine:
    """A transfer engine on one card."""

    def __init__(self, bind: Callable[[], None]) -> None:
        """``bind`` gives the calling thread the card's context."""
        self._bind = bind
        self._lock = threading.Lock()
        self._engine: Any = None
        self._registered: set[int] = set()
        self._fabric = False

    def open(self, config: MooncakeConfig) -> tuple[MooncakeConfig, Any]:
        """Start the engine.

        Returns:
            The configuration with the engine's address as our name, and what ``setup`` takes as
            its engine (None: it makes its own, for fabric memory).

        Raises:
            StoreError: the library or the card does not take it.
        """
        prepare_environment(os.environ)
        check(config, os.environ)
        self._bind()
        self._fabric = uses_fabric(os.environ)
        if self._fabric:
            return config, None
        try:
            library = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise StoreError(
                f"Mooncake's transfer engine cannot be loaded: {error}. Install the NPU build: pip "
                "install 'kvferry[npu]', source CANN's set_env.sh, and see kvworker doctor"
            ) from error
        engine = library.TransferEngine()
        host = config.local_hostname.rpartition(":")[0] or config.local_hostname
        code = engine.initialize(host, config.metadata_server, "ascend", "")
        if code != 0:
            raise StoreError(
                f"Mooncake's ascend transport does not start (code {code}): is /etc/hccn.conf "
                "there, are ports 11000 and up free, and is this the NPU build? See kvworker doctor"
            )
        self._engine = engine
        name = f"{host}:{engine.get_rpc_port()}"
        return msgspec.structs.replace(config, local_hostname=name), engine.get_engine()

    def register(self, address: int, size: int, location: str) -> bool:
        """Register memory once. False: it cannot be; the log says why."""
        problem = "" if self._fabric else self._register(address, size, location)
        if problem:
            _logger.error("Mooncake: %d bytes of memory (%s): %s", size, location, problem)
        return not problem

    def _register(self, address: int, size: int, location: str) -> str:
        if location != "cpu" and address % _HUGE:
            return f"device memory at {address:#x} is not aligned to 2 MiB"
        with self._lock:
            if len(self._registered) >= MAX_REGISTRATIONS:
                return f"{MAX_REGISTRATIONS} regions are registered, which is the limit"
            self._bind()
            code = self._engine.register_memory(address, size, location)
            if code == 0:
                self._registered.add(address)
        return "" if code == 0 else f"the transfer engine refuses it with code {code}"

    def unregister(self, address: int) -> None:
        """Undo ``register``. The library disconnects every peer for it: not for single requests."""
        with self._lock:
            if address in self._registered:
                self._registered.remove(address)
                self._bind()
                self._engine.unregister_memory(address)
