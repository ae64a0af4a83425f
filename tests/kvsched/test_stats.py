"""Counters in vLLM's log line and metrics."""

import collections
import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
    KVConnectorPromMetrics,
)

from kvsched.connector import KVFerryConnector
from kvsched.plugin import register
from kvsched.stats import KVFerryPromMetrics, KVFerryStats, StatsSource


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> KVTransferConfig:
    """vLLM knows the connector, as in an engine."""
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    register()
    return KVTransferConfig(kv_connector="KVFerryConnector", kv_role="kv_both")


def test_take_returns_only_what_moved() -> None:
    counters: collections.Counter[str] = collections.Counter(lookups=2, hits=1)
    source = StatsSource()
    first = source.take(counters)
    assert first is not None
    assert first.data == {"lookups": 2, "hits": 1}
    assert source.take(counters) is None
    counters["hits"] += 4
    second = source.take(counters)
    assert second is not None
    assert second.data == {"hits": 4}
    assert first.data == {"lookups": 2, "hits": 1}


def test_a_counter_that_appears_at_zero_has_not_moved() -> None:
    counters: collections.Counter[str] = collections.Counter()
    source = StatsSource()
    assert source.take(counters) is None
    counters["acks_late"] += 0
    assert source.take(counters) is None
    counters["acks_late"] += 1
    moved = source.take(counters)
    assert moved is not None
    assert moved.data == {"acks_late": 1}


def test_reports_add_up() -> None:
    one, two = KVFerryStats(data={"hits": 1, "lookups": 2}), KVFerryStats(data={"hits": 3})
    kept = copy.deepcopy(two.data)
    assert one.aggregate(two) is one
    assert one.data == {"hits": 4, "lookups": 2}
    assert two.data == kept


def test_the_log_line_leaves_out_what_did_not_move() -> None:
    stats = KVFerryStats(data={"hits": 4, "misses": 0})
    assert stats.reduce() == {"hits": 4}
    assert not stats.is_empty()
    assert KVFerryStats(data={"misses": 0}).is_empty()
    stats.reset()
    assert stats.is_empty()
    assert stats.data == {}


def test_vllms_log_line(transfer: KVTransferConfig) -> None:
    reports = [{"hits": 1}, {"hits": 2, "saves": 5}]
    log, lines = KVConnectorLogging(transfer), []
    for report in reports:
        log.observe(report)
    log.log(lambda text, *values: lines.append(text % values))
    assert lines == ["KV Transfer metrics: hits=3, saves=5"]
    # What was observed belongs to vLLM, which shows it elsewhere too.
    assert reports == [{"hits": 1}, {"hits": 2, "saves": 5}]


def test_vllms_metrics(transfer: KVTransferConfig) -> None:
    registry = CollectorRegistry()

    class Prom(KVConnectorProm):  # type: ignore[misc] # vLLM is not read
        _counter_cls = functools.partial(Counter, registry=registry)
        _gauge_cls = functools.partial(Gauge, registry=registry)

    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    prom = Prom(config, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]})
    assert isinstance(prom.prom_metrics, KVFerryPromMetrics)
    prom.observe({"hits": 2, "misses": 0}, 0)
    prom.observe({"hits": 3}, 0)
    prom.observe({"hits": 5}, 1)
    prom.observe({"blocks_quarantined": 7}, 0)
    prom.observe({"blocks_quarantined": -3}, 0)
    text = generate_latest(registry).decode()
    family = "vllm:kvferry_events_total"
    assert f'{family}{{counter="hits",engine="0",model_name="tiny"}} 5.0' in text
    assert f'{family}{{counter="hits",engine="1",model_name="tiny"}} 5.0' in text
    assert "misses" not in text
    gauge = 'vllm:kvferry_state{engine="0",gauge="blocks_quarantined",model_name="tiny"}'
    assert f"{gauge} 4.0" in text


def test_the_connector_makes_them() -> None:
    registry = CollectorRegistry()
    counter = functools.partial(Counter, registry=registry)
    gauge = functools.partial(Gauge, registry=registry)
    types: dict[Any, Any] = {Gauge: gauge, Counter: counter, Histogram: Histogram}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = KVFerryConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    assert isinstance(metrics, KVConnectorPromMetrics)
    stats = KVFerryConnector.build_kv_connector_stats({"hits": 1})
    assert isinstance(stats, KVFerryStats)
    assert KVFerryConnector.build_kv_connector_stats() == KVFerryStats()
