"""The daemon's description of itself."""

import os

from kvcommon import __version__
from kvcommon.config import DaemonConfig
from kvcommon.messages import Status, StoreState
from kvworker.assembly import Machinery
from kvworker.conversations import Conversations


def describe(
    config: DaemonConfig, endpoint: str, uptime_ns: int, machinery: Machinery, talk: Conversations
) -> Status:
    """Describe a daemon to a person. Called by its serving thread."""
    core = machinery.core.status()
    writer = machinery.writer
    # The core hears of a store that is not open yet only when something asks for it.
    state = core.store_state if machinery.store.is_open else StoreState.DOWN
    metrics = {
        **core.metrics,
        "kvferry_store_up": float(state is StoreState.UP),
        **{f"kvferry_store_{name}": value for name, value in machinery.store.metrics().items()},
        **{name: float(count) for name, count in talk.counts.items()},
        "kvferry_worker_conversations": float(len(talk.peers)),
        "kvferry_worker_uptime_seconds": uptime_ns / 1e9,
        "kvferry_worker_log_dropped_records_total": float(writer.num_dropped if writer else 0),
    }
    return Status(
        pid=os.getpid(),
        device=config.device,
        store=machinery.store.name,
        store_state=state,
        version=__version__,
        uptime_s=uptime_ns / 1e9,
        endpoint=endpoint,
        engines=core.engines,
        recent=core.recent,
        metrics=metrics,
        event_log=machinery.core.config.event_log,
    )
