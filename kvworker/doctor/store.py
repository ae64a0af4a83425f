"""Checks of the Mooncake store."""

import socket
from collections.abc import Iterator

from kvcommon.config import MooncakeConfig, mooncake_config
from kvcommon.errors import ConfigError, StoreError
from kvworker.doctor.report import Finding, Surroundings, fail, ok

_MASTER_S = 2.0


def check_store(around: Surroundings, path: str) -> tuple[MooncakeConfig | None, list[Finding]]:
    """Look at the library, the configuration and the master."""
    findings = list(_library())
    try:
        config = mooncake_config(path or None, around.environ)
    except ConfigError as error:
        remedy = "name the file: --mooncake-config, MOONCAKE_CONFIG_PATH, or set MOONCAKE_MASTER"
        return None, [*findings, fail("Mooncake configuration", str(error), remedy)]
    findings.append(
        ok("Mooncake configuration", f"{config.protocol}, master {config.master_server_address}")
    )
    findings.append(_master(config))
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


def _master(config: MooncakeConfig) -> Finding:
    host, _, port = config.master_server_address.rpartition(":")
    if "://" in config.master_server_address or not port.isdecimal():
        return ok("Mooncake master", f"found through {config.master_server_address}: not tried")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _MASTER_S):
            return ok("Mooncake master", "answers")
    except OSError as error:
        remedy = (
            f"mooncake_master --rpc_address {host} --rpc_port {port} --default_kv_lease_ttl 11000"
        )
        return fail("Mooncake master", str(error), remedy)
