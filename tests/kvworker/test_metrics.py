"""Numbers in Prometheus's text, also over HTTP, on loopback only."""

import urllib.error
import urllib.request

import pytest

from kvcommon.errors import ConfigError
from kvworker.metrics import DESCRIPTIONS, MetricsServer, prometheus_text

VALUES = {
    "kvferry_worker_conversations": 2.0,
    'kvferry_jobs_total{kind="load",outcome="done"}': 3.0,
    'kvferry_jobs_total{kind="save",outcome="failed"}': 1.0,
}


def test_text_has_families_with_labels() -> None:
    lines = prometheus_text(VALUES).splitlines()
    assert 'kvferry_jobs_total{kind="load",outcome="done"} 3.0' in lines
    assert 'kvferry_jobs_total{kind="save",outcome="failed"} 1.0' in lines
    assert "kvferry_worker_conversations 2.0" in lines
    assert lines.count("# TYPE kvferry_jobs_total counter") == 1
    assert "# TYPE kvferry_worker_conversations gauge" in lines
    assert (
        f"# HELP kvferry_worker_conversations {DESCRIPTIONS['kvferry_worker_conversations']}"
        in (lines)
    )


def test_served_on_loopback_and_gone_after_close() -> None:
    server = MetricsServer()
    port = server.start(0)
    url = f"http://127.0.0.1:{port}/metrics"
    server.show({"kvferry_a": 1.0})
    server.show(VALUES)
    with urllib.request.urlopen(url, timeout=10) as reply:
        text = reply.read().decode()
    assert "kvferry_worker_conversations 2.0" in text
    assert "kvferry_a" not in text
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_taken_port_is_a_configuration_error() -> None:
    first, second = MetricsServer(), MetricsServer()
    port = first.start(0)
    with pytest.raises(ConfigError, match=str(port)):
        second.start(port)
    first.close()
    second.close()
