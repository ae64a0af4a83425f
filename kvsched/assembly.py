"""Puts the two sides together from vLLM's configuration and ours."""

import logging
import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from kvcommon.config import ConnectorConfig, DaemonConfig
from kvcommon.describe import GroupSpec, describe_cache, layout_digest
from kvcommon.endpoints import daemon_endpoint, run_dir
from kvcommon.errors import ConfigError
from kvcommon.ids import EngineId, new_epoch
from kvcommon.keys import fingerprint
from kvcommon.memory.export import Exporter, make_exporter
from kvcommon.memory.page import ProgressPage
from kvcommon.messages import Attach
from kvsched import compat
from kvsched.attachment import Attachment
from kvsched.clocked import ClockedDataLink
from kvsched.core.core import CoreConfig
from kvsched.link import DaemonLink
from kvsched.metadata import RankHandshake, RankInfo, rank_handshake
from kvsched.model_side import ModelSide
from kvsched.pending import DataLink

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.kvferry.assembly")

#: The one place where the two halves of kvferry meet: inline mode.
INLINE_GROUP, INLINE_NAME = "kvferry.inline", "daemon"


def core_config(
    config: ConnectorConfig, vllm_config: "VllmConfig", group: compat.Group
) -> CoreConfig:
    """What the scheduler side's core must know."""
    can_load, can_save = compat.roles(vllm_config)
    if vllm_config.kv_transfer_config.kv_load_failure_policy == "fail" and can_load:
        logger.warning(
            "kvferry: kv_load_failure_policy is 'fail': a block that is evicted between lookup and "
            "load ends its request with an error; 'recompute' computes it instead"
        )
    return CoreConfig(
        block_size=group.block_size,
        num_blocks=group.num_blocks,
        load=config.load,
        can_load=can_load,
        can_save=can_save,
        save_decode=config.save_decode,
        sync_is_safe=compat.sync_load_is_safe(vllm_config),
        lookup_timeout_ms=config.lookup_timeout_ms,
        ack_timeout_ms=config.ack_timeout_ms,
        fence_timeout_ms=config.fence_timeout_ms,
        load_timeout_ms=config.load_timeout_ms,
        max_held_blocks=int(group.num_blocks * config.max_held_fraction),
        min_load_blocks=config.min_load_blocks,
        num_bytes_per_block=group.block_bytes,
        validate=config.validate,
    )


def rank_endpoint(config: ConnectorConfig, device: str, rank: int) -> str:
    """Where the daemon of a rank is.

    Raises:
        ConfigError: ``daemons`` is a list with no entry for this rank.
    """
    if config.daemons == "auto":
        return daemon_endpoint(run_dir(config.run_dir), device)
    if isinstance(config.daemons, str):
        return config.daemons
    if rank >= len(config.daemons):
        raise ConfigError(
            f"daemons lists {len(config.daemons)} endpoints, and this is rank {rank}: name one per "
            'rank, or use "auto"'
        )
    return config.daemons[rank]


def build_model_side(
    config: ConnectorConfig,
    vllm_config: "VllmConfig",
    engine: EngineId,
    group: compat.Group,
    kv_caches: "Mapping[str, torch.Tensor]",
) -> tuple[ModelSide, RankHandshake]:
    """Describe and export the KV cache, begin to attach, and introduce the rank.

    Raises:
        ConfigError, HandleError: the cache cannot be shared; says what to change.
    """
    where = compat.placement(vllm_config)
    spec = GroupSpec(
        group=0,
        block_size=group.block_size,
        num_blocks=group.num_blocks,
        layer_names=group.layer_names,
    )
    layout, storages = describe_cache(kv_caches, [spec])
    (served,) = layout.groups
    identity = compat.namespace(vllm_config, group, where, layout_digest(served), config.label)
    inline = config.mode == "inline"
    exporter = make_exporter(storages, inline=inline)
    # What moves the memory happens here, before any step, and not in the thread.
    exporter.prepare()
    device = exporter.device or compat.device_name(storages[0].device, where.local_rank)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    if inline:
        near, far = _start_inline(config, engine, where.rank, device, context)
    else:
        near = far = rank_endpoint(config, device, where.rank)
    attach = Attach(
        pid=os.getpid(),
        device=device,
        storages=(),
        layout=layout,
        page=(page := ProgressPage.create()).handle,
        namespace=identity,
        lease_ms=int(config.lease_ms),
    )

    def link(role: str) -> DaemonLink:
        return DaemonLink(context, near, where.rank, role)

    model = _model_side(
        config,
        engine,
        exporter,
        attach=attach,
        page=page,
        link=link,
        hooks_wait=compat.hooks_wait(vllm_config),
    )
    info = RankInfo(
        rank=where.rank,
        endpoint=far,
        device=device,
        fingerprint=fingerprint(identity),
        object_bytes=served.object_bytes,
        block_size=group.block_size,
        num_blocks=group.num_blocks,
    )
    return model, rank_handshake(info)


def _model_side(
    config: ConnectorConfig,
    engine: EngineId,
    exporter: Exporter,
    *,
    attach: Attach,
    page: ProgressPage,
    link: Callable[[str], DaemonLink],
    hooks_wait: bool,
) -> ModelSide:
    """Begin to attach, and make what speaks and waits in steps.

    Args:
        config: The connector's options.
        engine: vLLM's engine id.
        exporter: Of the KV memory.
        attach: What to say to a daemon, but for the memory itself, exported for each attach.
        page: The progress page, from now on the model side's.
        link: Makes the link of a role to the daemon.
        hooks_wait: See ``compat.hooks_wait``.
    """

    def export() -> Attach:
        exporter.bind_thread()
        return msgspec.structs.replace(attach, storages=exporter.handles(), proof=exporter.proof())

    epoch = new_epoch()
    layers = tuple(layer.name for layer in attach.layout.groups[0].layers)
    attachment = Attachment(
        lambda: link("model"),
        engine,
        epoch,
        export=export,
        page=page,
        heartbeat_ms=config.heartbeat_ms,
        proven=exporter.proven,
    )
    clock = exporter.clock(2 * len(layers) + 2)
    data = (
        DataLink(link("data"), engine, epoch)
        if clock is None
        else ClockedDataLink(link("data"), engine, epoch, clock, attachment)
    )
    return ModelSide(attachment, page, data, layers, config.load_timeout_ms, hooks_wait=hooks_wait)


def _start_inline(
    config: ConnectorConfig,
    engine: EngineId,
    rank: int,
    device: str,
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> tuple[str, str]:
    """Start the daemon in a thread of this process; returns (our endpoint, the scheduler's)."""
    found = list(entry_points(group=INLINE_GROUP, name=INLINE_NAME))
    if not found:
        raise ConfigError("mode: inline needs the installed kvferry package (its kvworker part)")
    start = found[0].load()
    directory: Path = run_dir(config.run_dir)
    near = f"inproc://kvferry-{engine}-{rank}"
    # Operators choose engine ids; a file name takes fewer characters.
    short = re.sub(r"[^A-Za-z0-9]", "", engine)[:8] or "engine"
    far = f"ipc://{directory}/in-{short}-{rank}-{os.getpid()}.sock"
    start(
        DaemonConfig(
            device=device,
            store=config.store,
            mooncake_config=config.mooncake_config,
            memory_limit=config.memory_limit_bytes,
            run_dir=str(directory),
            endpoint=far,
            event_log=config.event_log,
            event_log_mode=config.event_log_mode,
            event_log_ring_s=config.event_log_ring_s,
            event_log_redact=config.event_log_redact,
            event_log_compress=config.event_log_compress,
            validate=config.validate,
        ),
        context=context,
        endpoints=(near,),
    )
    return near, far
