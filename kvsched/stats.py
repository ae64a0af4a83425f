"""The scheduler side's counters in vLLM's own log lines and metrics.

vLLM asks for stats in every step; nothing is built unless a counter has moved.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Name of the metric family (Prometheus adds ``_total``).
FAMILY = "vllm:kvferry_events"
#: Those that go up and down, and their metric family.
GAUGES = ("blocks_quarantined",)
GAUGE_FAMILY = "vllm:kvferry_state"


class KVFerryStats(KVConnectorStats):
    """How far each counter has moved since the last report. ``data``: counter name → number."""

    data: dict[str, int]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVFerryStats":
        """Add another report to this one."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Numbers for vLLM's log line: those that moved."""
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Nothing moved."""
        return not any(self.data.values())


class StatsSource:
    """Turns ever-growing counters into reports of what moved."""

    def __init__(self) -> None:
        """Start from zero."""
        self._reported: dict[str, int] = {}

    def take(self, counters: Mapping[str, int]) -> KVFerryStats | None:
        """Return what moved since the last call, or None."""
        if counters == self._reported:
            return None
        moved = {
            name: value - self._reported.get(name, 0)
            for name, value in counters.items()
            if value != self._reported.get(name, 0)
        }
        self._reported = dict(counters)
        return KVFerryStats(data=moved) if moved else None


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """Our counters in vLLM's ``/metrics``: one family, the counter's name as a label."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the family."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._family = self._counter_cls(
            name=FAMILY,
            documentation="kvferry's scheduler side, by counter (docs/metrics.md)",
            labelnames=[*labelnames, "counter"],
        )
        self._gauges = self._gauge_cls(
            name=GAUGE_FAMILY,
            documentation="kvferry's scheduler side, by gauge (docs/metrics.md)",
            labelnames=[*labelnames, "gauge"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in GAUGES:
                # What comes is by how much it moved, like everything here.
                self._gauges.labels(*labels, name).inc(value)
            elif value > 0:
                self._family.labels(*labels, name).inc(value)
