"""The daemon's numbers: names, meanings, and their Prometheus text.

Names are stable: they are what ``kvworker status --json`` shows and what Prometheus scrapes. The
core and the store add their own by the same rules: ``kvferry_`` in front, counters end in
``_total``, units last, labels within the name as Prometheus writes them.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.metrics_core import Metric

from kvcommon.errors import ConfigError

#: The shell's own, by name.
DESCRIPTIONS: dict[str, str] = {
    "kvferry_worker_messages_received_total": "Messages read from the socket",
    "kvferry_worker_messages_sent_total": "Messages given to the socket",
    "kvferry_worker_messages_dropped_total": "Messages that made no sense",
    "kvferry_worker_messages_refused_total": "Messages outside of any open conversation",
    "kvferry_worker_messages_unsent_total": "Messages that could not be sent, or had no receiver",
    "kvferry_worker_conversations_broken_total": "Conversations that ended by a gap or a death",
    "kvferry_worker_conversations": "Open conversations",
    "kvferry_worker_uptime_seconds": "Time since the daemon began to serve",
    "kvferry_worker_log_dropped_records_total": "Event log records lost to a full disk",
}
_LOOPBACK = "127.0.0.1"
#: One label inside the braces of a full name, ``name{label="value"}``.
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)"')

logger = logging.getLogger("kvferry.worker")


class _Collector:
    """Turns a snapshot into Prometheus metric families on each scrape."""

    def __init__(self, snapshot: Callable[[], Mapping[str, float]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for full, value in sorted(self._snapshot().items()):
            name, _, inside = full.partition("{")
            labels = dict(_LABEL.findall(inside))
            if name not in families:
                kind = "counter" if name.endswith("_total") else "gauge"
                stem = name.removesuffix("_total")
                families[name] = Metric(stem, DESCRIPTIONS.get(name, stem), kind)
            families[name].add_sample(name, labels, value)
        yield from families.values()


def registry(snapshot: Callable[[], Mapping[str, float]]) -> CollectorRegistry:
    """Make a registry, apart from the process's own, that shows ``snapshot()`` when scraped."""
    made = CollectorRegistry()
    made.register(_Collector(snapshot))
    return made


def prometheus_text(values: Mapping[str, float]) -> str:
    """Write numbers by metric name in Prometheus's text format."""
    return generate_latest(registry(lambda: values)).decode()


class MetricsServer:
    """Serves the latest snapshot over HTTP on loopback, from a thread of its own."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    def start(self, port: int) -> int:
        """Listen on ``127.0.0.1:port`` (0: any free port). Returns the port.

        Raises:
            ConfigError: the port cannot be used.
        """
        try:
            self._server, self._thread = start_http_server(
                port, addr=_LOOPBACK, registry=registry(lambda: self._values)
            )
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on {_LOOPBACK}:{port}: {error}") from None
        logger.info("metrics at http://%s:%d/metrics", _LOOPBACK, self._server.server_port)
        return self._server.server_port

    @property
    def is_running(self) -> bool:
        """It was started and not closed."""
        return self._server is not None

    def show(self, values: Mapping[str, float]) -> None:
        """Replace what is shown (one assignment, so a scrape sees one snapshot or the next)."""
        self._values = dict(values)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
