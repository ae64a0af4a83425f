"""Checks of the Mooncake store."""

import re
import socket
from collections.abc import Iterator

from kvcommon.config import MooncakeConfig, mooncake_config
from kvcommon.errors import ConfigError, StoreError
from kvworker.doctor.client import become_client
from kvworker.doctor.report import Finding, Surroundings, fail, ok, warn

_MASTER_S = 2.0
_MIB = 1 << 20
#: Mooncake allocates no smaller one.
_SMALLEST_SEGMENT = 16 * _MIB
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)


def check_store(
    around: Surroundings, path: str, *, probe: bool = False
) -> tuple[MooncakeConfig | None, list[Finding]]:
    """Look at the library, the configuration and the master.

    ``probe``: become a client of the master, for a moment; else only see whether it listens.
    """
    findings = list(_library())
    try:
        config = mooncake_config(path or None, around.environ)
    except ConfigError as error:
        remedy = "name the file: --mooncake-config, MOONCAKE_CONFIG_PATH, or set MOONCAKE_MASTER"
        return None, [*findings, fail("Mooncake configuration", str(error), remedy)]
    findings.append(
        ok("Mooncake configuration", f"{config.protocol}, master {config.master_server_address}")
    )
    findings.append(_segment(around, config))
    findings.append(_master(config, probe=probe))
    return config, findings


def _library() -> Iterator[Finding]:
    from kvworker.stores.mooncake_connect import load_library

    try:
        load_library()
    except StoreError as error:
        yield fail(
            "Mooncake", str(error), "see above; apt-get install libibverbs1 libnuma1 libcurl4"
        )
    else:
        yield ok("Mooncake", "loads, and has put sessions")


def _segment(around: Surroundings, config: MooncakeConfig) -> Finding:
    size = config.global_segment_size
    found = f"{size / _MIB:,.0f} MiB"
    if 0 < size < _SMALLEST_SEGMENT:
        return fail("store segment", f"{size} bytes", "global_segment_size: 0, or 16 MiB at least")
    free = _AVAILABLE.search(around.read("/proc/meminfo"))
    if free is not None and size > int(free[1]) * 1024:
        remedy = "lower global_segment_size (or MOONCAKE_GLOBAL_SEGMENT_SIZE)"
        return warn("store segment", f"{found}, more than the memory that is free now", remedy)
    return ok("store segment", found)


def _master(config: MooncakeConfig, *, probe: bool) -> Finding:
    from kvworker.stores.mooncake_connect import master_place

    try:
        place = master_place(config.master_server_address)
    except StoreError as error:
        remedy = "set master_server_address, or MOONCAKE_MASTER, to <host>:<port>"
        return fail("Mooncake master", str(error), remedy)
    if place is None:
        return ok("Mooncake master", f"found through {config.master_server_address}: not tried")
    host, port = place
    try:
        with socket.create_connection((host, port), _MASTER_S):
            pass
        if not probe or config.protocol != "tcp":
            return ok("Mooncake master", "listens")
        refusal = become_client(config)
        if refusal:
            return fail("Mooncake master", refusal, "see above; also the master's own log")
        return ok("Mooncake master", "answers")
    except OSError as error:
        remedy = (
            f"mooncake_master --rpc_address {host} --rpc_port {port} --default_kv_lease_ttl 11000"
        )
        return fail("Mooncake master", str(error), remedy)
