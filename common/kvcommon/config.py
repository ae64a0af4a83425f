"""Configuration: what users may set, with types, defaults and errors that say what to change.

Three parts: the connector's options (``kv_connector_extra_config`` of vLLM), Mooncake's JSON file,
and the daemon's own. Unknown names are refused, never ignored: a misspelt option that does nothing
costs its user days.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvcommon.endpoints import check_endpoint
from kvcommon.errors import ConfigError
from kvcommon.eventlog import LogOptions
from kvcommon.sizes import parse_size

#: Eleven days: longer waits mean "for ever", and would not fit into what counts nanoseconds.
_LONGEST_MS = 1e9
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_MS)]
PositiveMs = Annotated[float, msgspec.Meta(gt=0, le=_LONGEST_MS)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=_LONGEST_MS / 1000)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
StoreName = Literal["memory", "mooncake"]

GiB = 1 << 30
MiB = 1 << 20


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the vLLM connector (``kv_connector_extra_config``)."""

    #: ``daemon``: a process of its own per device; ``inline``: a thread of the model process.
    mode: Literal["daemon", "inline"] = "daemon"
    #: Endpoint of each rank's daemon, one for all, or ``auto``: by device in the run directory.
    daemons: str | list[str] = "auto"
    #: Directory of the daemons' sockets; empty: see ``kvcommon.endpoints.run_dir``.
    run_dir: str = ""
    #: How to load: ``auto`` chooses per request.
    load: Literal["auto", "layerwise", "async"] = "auto"
    #: Save blocks that fill up while generating, not only those of prompts.
    save_decode: bool = False
    #: How long the first question about a request may wait for a lookup's answer.
    lookup_wait_ms: Milliseconds = 2.0
    #: A lookup without answer for so long counts as a miss.
    lookup_timeout_ms: PositiveMs = 100
    #: A load without end for so long counts as failed.
    load_timeout_ms: PositiveMs = 5000
    #: A plan without acknowledgement for so long means that the daemon is not well.
    ack_timeout_ms: PositiveMs = 2000
    #: A daemon of this host that has said nothing for so long, while it may touch blocks, is killed
    #: before its blocks are given back. Below the store's lease, so that nothing stale is written.
    fence_timeout_ms: PositiveMs = 8000
    heartbeat_ms: PositiveMs = 1000
    #: The daemon may drop a rank, and the scheduler side a daemon, unheard of for so long.
    lease_ms: PositiveMs = 10000
    #: Largest part of the KV cache that loads and saves may keep from being freed.
    max_held_fraction: Fraction = 0.25
    #: A shorter hit is not worth loading.
    min_load_blocks: PositiveInt = 1
    #: Extra word in every key, to separate tenants, or weights of the same name.
    label: str = ""
    #: Directory for the scheduler side's event log; empty: none.
    event_log: str = ""
    #: ``on``: every event goes to the log; ``ring``: the last ``event_log_ring_s`` seconds are kept
    #: in memory, and written when something fails or ``kvworker dump`` asks.
    event_log_mode: Literal["on", "ring"] = "on"
    event_log_ring_s: PositiveSeconds = 30.0
    #: Hash request ids in the log.
    event_log_redact: bool = False
    #: Compress closed files of the log.
    event_log_compress: bool = False
    #: Check every invariant after every event (slow).
    validate: bool = False
    #: Inline mode: the store, Mooncake's JSON file, and the size of the ``memory`` store.
    store: StoreName = "memory"
    mooncake_config: str = ""
    memory_limit: int | str = "1GiB"

    @property
    def memory_limit_bytes(self) -> int:
        """``memory_limit`` in bytes; raises ``ConfigError`` if it is no size."""
        return parse_size(self.memory_limit)

    @property
    def log_options(self) -> LogOptions:
        """How the event log is kept."""
        return LogOptions(
            mode=self.event_log_mode,
            ring_s=self.event_log_ring_s,
            redact=self.event_log_redact,
            compress=self.event_log_compress,
        )


class MooncakeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach Mooncake. The names are those of Mooncake's own JSON file.

    Sizes are bytes here; in the file they may be text (``kvcommon.sizes``).
    """

    #: ``<host>:<port>`` of ``mooncake_master``.
    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    #: Memory that this daemon lends to the store; 0: none.
    global_segment_size: Annotated[int, msgspec.Meta(ge=0)] = 4 * GiB
    #: Mooncake's own buffer for calls that do not name memory.
    local_buffer_size: Annotated[int, msgspec.Meta(ge=0)] = 16 * MiB
    #: ``tcp``, ``rdma``, ``ascend``, …: what the installed build of Mooncake offers.
    protocol: str = "tcp"
    #: RDMA devices, separated by commas; empty: let Mooncake choose.
    device_name: str = ""
    #: Segment in which new objects should be placed.
    preferred_segment: str = ""
    #: Place new objects on this node where possible.
    prefer_alloc_in_same_node: bool = False
    #: Name under which other clients reach this one.
    local_hostname: str = "127.0.0.1"
    #: The lease that the master grants (its ``--default_kv_lease_ttl``).
    store_lease_ms: PositiveInt = 10000


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one daemon serves and how."""

    #: For example ``npu:3`` or ``cpu:0``.
    device: str
    store: StoreName
    #: Mooncake's JSON file; empty: ``MOONCAKE_CONFIG_PATH``.
    mooncake_config: str = ""
    #: Bytes that the ``memory`` store may hold.
    memory_limit: int = GiB
    run_dir: str = ""
    #: Where to serve; empty: by device in the run directory.
    endpoint: str = ""
    #: Directory for the daemon's event log; empty: none.
    event_log: str = ""
    #: ``on``: every event goes to the log; ``ring``: the last ``event_log_ring_s`` seconds are kept
    #: in memory, and written when something fails or ``kvworker dump`` asks.
    event_log_mode: Literal["on", "ring"] = "on"
    event_log_ring_s: PositiveSeconds = 30.0
    #: Hash request ids in the log.
    event_log_redact: bool = False
    #: Compress closed files of the log.
    event_log_compress: bool = False
    #: Check every invariant after every event (slow).
    validate: bool = False
    heartbeat_ms: PositiveInt = 1000
    #: Niceness of the threads that save, relative to the others.
    save_nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 10
    #: ``layerwise``: write layers while the step computes, publish after its verdict. ``auto``: so,
    #: but where the store lies in this process's memory, copy whole blocks there after the verdict,
    #: which takes a fraction of the processor time.
    save: Literal["auto", "layerwise"] = "auto"
    #: Accelerators: let the store read and write the engine's memory itself, where it can.
    direct: bool = False
    #: Plan of faults to rehearse (``kvworker.faults``); empty: none.
    inject: str = ""

    @property
    def log_options(self) -> LogOptions:
        """How the event log is kept."""
        return LogOptions(
            mode=self.event_log_mode,
            ring_s=self.event_log_ring_s,
            redact=self.event_log_redact,
            compress=self.event_log_compress,
        )


_Config = TypeVar("_Config", bound=msgspec.Struct)


def connector_config(raw: Mapping[str, object]) -> ConnectorConfig:
    """Check the connector's options.

    Raises:
        ConfigError: names the option and, if it is unknown, the nearest one that exists.
    """
    config = _convert(raw, ConnectorConfig, "kv_connector_extra_config")
    try:
        parse_size(config.memory_limit)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: memory_limit: {error}") from None
    if config.heartbeat_ms >= config.lease_ms:
        raise ConfigError(
            f"kv_connector_extra_config: heartbeat_ms ({config.heartbeat_ms:g}) must be below "
            f"lease_ms ({config.lease_ms:g}), a third of it at most: an engine that sends no sign "
            "of life within its lease is dropped"
        )
    try:
        for endpoint in [config.daemons] if isinstance(config.daemons, str) else config.daemons:
            if endpoint != "auto" or isinstance(config.daemons, list):
                check_endpoint(endpoint)
    except ConfigError as error:
        where = "kv_connector_extra_config: daemons"
        raise ConfigError(f'{where}: {error}, or use "auto"') from None
    return config


def mooncake_config(path: str | None, environ: Mapping[str, str] = os.environ) -> MooncakeConfig:
    """Read Mooncake's configuration.

    Args:
        path: The JSON file; None or empty: the one that ``MOONCAKE_CONFIG_PATH`` names. Without
            either, ``MOONCAKE_MASTER`` alone is enough.
        environ: ``MOONCAKE_MASTER`` and ``MOONCAKE_GLOBAL_SEGMENT_SIZE`` override the file.

    Raises:
        ConfigError: the file cannot be read, or a value is missing or wrong.
    """
    path = path or environ.get("MOONCAKE_CONFIG_PATH", "")
    raw = _read_json(path) if path else {}
    origins = dict.fromkeys(raw, path)
    for name, variable in _OVERRIDES.items():
        if environ.get(variable):
            raw[name], origins[name] = environ[variable], variable
    for name in ("global_segment_size", "local_buffer_size"):
        if name in raw:
            raw[name] = _size(raw[name], f"{origins[name]}: {name}")
    if not raw.get("master_server_address"):
        raise ConfigError(
            f"{path or 'Mooncake'}: no master_server_address: set it there, or set "
            "MOONCAKE_MASTER to <host>:<port> of mooncake_master, or MOONCAKE_CONFIG_PATH to "
            "Mooncake's JSON file"
        )
    return _convert(raw, MooncakeConfig, path or "MOONCAKE_MASTER")


_OVERRIDES = {
    "master_server_address": "MOONCAKE_MASTER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
}


def _size(value: Any, where: str) -> int:  # noqa: ANN401 - whatever stands in the file
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _read_json(path: str) -> dict[str, object]:
    try:
        text = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read Mooncake's configuration {path}: {error.strerror}; name "
            "another file, or set MOONCAKE_CONFIG_PATH"
        ) from None
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not Mooncake's JSON configuration: {error}") from None


def _convert(raw: Mapping[str, object], kind: type[_Config], where: str) -> _Config:
    """Convert a mapping to a configuration Struct.

    Raises:
        ConfigError: unknown names, with the nearest known one; wrong values, with their path.
    """
    known = kind.__struct_fields__
    for name in raw:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown option {name!r}; {hint}")
    try:
        return msgspec.convert(dict(raw), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
