"""Connect to a Mooncake master, with errors that say what to do."""

import importlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from kvcommon.config import MooncakeConfig
from kvcommon.errors import StoreError, StoreUnreachable
from kvworker.stores import mooncake_codes as codes
from kvworker.stores.mooncake_client import MooncakeClient

_RPC_TIMEOUT = "MC_RPC_TIMEOUT_MS"
#: The library's own switches, set unless the user has set them. A frozen master then blocks a call
#: for 5 s instead of 30, and an unreachable one a connection attempt for 2 s instead of 30; a
#: refused configuration is said at once instead of after 20 tries; and only warnings are written to
#: standard error.
_ENVIRONMENT = {
    _RPC_TIMEOUT: "5000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    "GLOG_minloglevel": "1",
}
#: How long to wait for the master's port. The library itself would try for 90 s, holding the
#: interpreter lock.
_MASTER_WAIT_S = 3.0
_LAST_PORT = 65535
#: The newest method that we need; it came with 0.3.13.
_NEEDED = "batch_put_session_start"


def load_library() -> Any:  # noqa: ANN401 - the library has no types
    """Import ``mooncake.store``.

    Raises:
        StoreError: not installed, not loadable, or too old.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        library = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise StoreError(
            "Mooncake is not installed here. Install the extra for your device: "
            "pip install 'kvferry[cpu]', 'kvferry[npu]' or 'kvferry[cuda]'"
        ) from error
    except ImportError as error:
        raise StoreError(
            f"Mooncake is installed but cannot be loaded: {error}. On Debian and Ubuntu it needs "
            "apt-get install libibverbs1 (the NPU build also libnuma1 and libcurl4)"
        ) from error
    if not hasattr(library.MooncakeDistributedStore, _NEEDED):
        raise StoreError(
            "this Mooncake is too old: it has no put sessions. Install 0.3.13 or later: "
            "pip install -U 'mooncake-transfer-engine-non-cuda>=0.3.13' (or your device's build)"
        )
    return library


def connect(
    library: Any,  # noqa: ANN401
    config: MooncakeConfig,
    nice: int,
    engine: Any = None,  # noqa: ANN401
    bind: Callable[[], None] | None = None,
) -> MooncakeClient:
    """Set a client up and mount its segment.

    ``engine`` is a transfer engine that the client is to use; ``bind`` prepares the thread in which
    it is set up.

    The library's threads are born in a thread whose nice value is ``nice`` and inherit it (Linux
    keeps it per thread), so that they give way to the model. The caller's own value stays.

    Raises:
        StoreUnreachable: no master answers at this address.
        StoreError: the library refuses the configuration.
    """
    _check_addresses(config)
    raw = library.MooncakeDistributedStore()
    answer: list[int] = []
    begun = time.monotonic()

    def set_up() -> None:
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        if nice > own:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        if bind is not None:
            bind()
        answer.append(_set_up(raw, config, engine))

    thread = threading.Thread(target=set_up, name="mooncake-setup")
    thread.start()
    thread.join()
    if answer != [0]:
        raise _refusal(config, answer, time.monotonic() - begun)
    return MooncakeClient(raw)


def _refusal(config: MooncakeConfig, answer: list[int], seconds: float) -> StoreError:
    """Say why: the library has one code for a wrong protocol and for a master that hangs."""
    if answer == [codes.INVALID_PARAMS]:
        return StoreError(
            f"Mooncake cannot use these sizes: global_segment_size {config.global_segment_size}, "
            f"local_buffer_size {config.local_buffer_size} bytes. A segment is 0 or at least 16 MiB"
            ", and both must fit into the memory that is free"
        )
    # It refuses what is wrong sooner than it gives a silent master up.
    if seconds >= int(os.environ.get(_RPC_TIMEOUT, "30000")) / 1000:
        return StoreUnreachable(
            f"what listens at {config.master_server_address} took {seconds:.0f} s and did not "
            "answer: the Mooncake master is frozen or overloaded, or this is another service. "
            "Restart it, or correct master_server_address or MOONCAKE_MASTER"
        )
    # It may have died since it was asked.
    _check_addresses(config)
    return StoreError(
        f"Mooncake refused this configuration (its log on standard error says more): "
        f"master {config.master_server_address}, protocol {config.protocol!r}, device "
        f"{config.device_name!r}, local_hostname {config.local_hostname!r}, metadata_server "
        f"{config.metadata_server!r}. Without an RDMA device the protocol is 'tcp'; and what "
        "listens there must be a Mooncake master"
    )


def placement(library: Any, segment: str, *, same_node: bool) -> Any:  # noqa: ANN401
    """Build a ``ReplicateConfig``. Attributes come and go between releases of the library."""
    config = library.ReplicateConfig()
    if segment and hasattr(config, "preferred_segments"):
        config.preferred_segments = [segment]
    elif segment and hasattr(config, "preferred_segment"):
        config.preferred_segment = segment
    if hasattr(config, "prefer_alloc_in_same_node"):
        config.prefer_alloc_in_same_node = same_node
    return config


def local_copies(protocol: str) -> bool:
    """Tell whether the library copies whole objects of its own segment by memory.

    It does so by itself when TCP is its only transport, and else as ``MC_STORE_MEMCPY`` says.
    """
    switch = os.environ.get("MC_STORE_MEMCPY", "").lower()
    return switch in {"1", "true", "yes", "on"} or (not switch and protocol == "tcp")


def _set_up(raw: Any, config: MooncakeConfig, engine: Any) -> int:  # noqa: ANN401
    settings = _settings(config)
    if engine is None:
        return int(raw.setup(settings))
    # The form with a dictionary takes no engine. This is the order of the other one.
    return int(
        raw.setup(
            settings["local_hostname"],
            settings["metadata_server"],
            config.global_segment_size,
            config.local_buffer_size,
            settings["protocol"],
            settings["rdma_devices"],
            settings["master_server_addr"],
            engine,
        )
    )


def _settings(config: MooncakeConfig) -> dict[str, str]:
    return {
        "local_hostname": config.local_hostname,
        "metadata_server": config.metadata_server,
        "global_segment_size": str(config.global_segment_size),
        "local_buffer_size": str(config.local_buffer_size),
        "protocol": config.protocol,
        "rdma_devices": config.device_name,
        "master_server_addr": config.master_server_address,
    }


def master_place(address: str) -> tuple[str, int] | None:
    """Split a master's address into host and port; None: it is found by etcd, Redis or the like.

    Raises:
        StoreError: it is no address.
    """
    if "://" in address:
        return None
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        # What the resolver does with a name that is not ASCII, or has an empty part.
        host.encode("idna")
    except UnicodeError:
        host = ""
    if not host or not (port.isdecimal() and 0 < int(port) <= _LAST_PORT):
        raise StoreError(
            f"master_server_address {address!r} is not HOST:PORT; set it in the Mooncake "
            "configuration file or in MOONCAKE_MASTER"
        )
    return host, int(port)


def _check_addresses(config: MooncakeConfig) -> None:
    address = config.master_server_address
    place = master_place(address)
    if place is None:  # the library's business
        return
    host, port = place
    try:
        peer = _peer(host, port)
    except OSError as error:
        raise StoreUnreachable(
            f"no Mooncake master answers at {address} ({error}). Start one with: mooncake_master "
            f"--rpc_address {host} --rpc_port {port} --enable_http_metadata_server=false; "
            "or correct master_server_address or MOONCAKE_MASTER"
        ) from error
    if _is_loopback(config.local_hostname) and not _is_loopback(peer):
        raise StoreError(
            f"local_hostname is {config.local_hostname!r} but the master at {address} is on "
            "another host: others could not reach this one's segment, and two hosts would have "
            "the same name. Set local_hostname to this host's address"
        )


def _peer(host: str, port: int) -> str:
    """Connect, disconnect, and say to whom it was."""
    with socket.create_connection((host, port), _MASTER_WAIT_S) as link:
        return str(link.getpeername()[0])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
