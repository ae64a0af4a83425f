"""The scheduler side's counters in vLLM's own log lines and metrics.

vLLM asks for stats in every step; nothing is built unless a counter has moved.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

#: Prefix of every metric, as in ``docs/metrics.md``.
PREFIX = "vllm:kvferry_"


class KVFerryStats(KVConnectorStats):
    """How far each counter has moved since the last report. ``data``: counter name → number."""

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
        self._reported: dict[str, float] = {}

    def take(self, counters: Mapping[str, float]) -> KVFerryStats | None:
        """Return what moved since the last call, or None."""
        if counters == self._reported:
            return None
        moved = {
            name: value - self._reported.get(name, 0)
            for name, value in counters.items()
            if value != self._reported.get(name, 0)
        }
        self._reported = dict(counters)
        return KVFerryStats(data=moved)


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter per counter of ours, labelled as vLLM labels its own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        names: tuple[str, ...],
    ) -> None:
        """Register a counter for each name."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Callable[[int], Any]] = {}
        for name in names:
            family = self._counter_cls(
                name=PREFIX + name,
                documentation=f"kvferry scheduler side: {name} (docs/metrics.md)",
                labelnames=labelnames,
            )
            self._counters[name] = self._per_engine(family)

    def _per_engine(self, family: Any) -> Callable[[int], Any]:
        values = self.per_engine_labelvalues
        children: dict[int, Any] = {}

        def child(engine: int) -> Any:
            if engine not in children:
                children[engine] = family.labels(*values.get(engine, [str(engine)]))
            return children[engine]

        return child

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        for name, value in transfer_stats_data.items():
            counter = self._counters.get(name)
            if counter is not None and value > 0:
                counter(engine_idx).inc(value)
