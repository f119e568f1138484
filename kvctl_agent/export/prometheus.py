"""HTTP endpoint for Prometheus: serves the metrics of the admin command `metrics`, and process metrics.

One thread serves one scrape at a time: a slow client delays the next scrape by a few seconds, but never the agent.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from kvctl_agent.contract.snapshots import MetricFamily
from kvctl_agent.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

Families = Callable[[], list[MetricFamily]]

_CLIENT_S = 5.0
_PORTS = 256
_TOTAL = "_total"


class Address:
    """Address to listen on: `127.0.0.1:9400`, or `127.0.0.1:9400+` for the first free port from 9400 upwards.

    Raises:
        ConfigError: the text has another form.
    """

    def __init__(self, text: str) -> None:
        wrong = f"metrics_endpoint = {text!r}: write address:port, or address:port+ for the first free port upwards"
        host, separator, port = text.removesuffix("+").rpartition(":")
        try:
            self.ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
            first = int(port)
        except ValueError:
            raise ConfigError(wrong) from None
        if not separator or not 0 <= first < 1 << 16:
            raise ConfigError(wrong)
        self.text = text
        last = first + _PORTS if text.endswith("+") else first + 1
        self.ports = range(first, min(last, 1 << 16))

    @property
    def local(self) -> bool:
        """Whether the address is a loopback address."""
        return self.ip.is_loopback


class _Handler(WSGIRequestHandler):
    def handle(self) -> None:
        """Serves one scrape within a total time limit; with a limit per read, a client could send byte by byte."""
        limit = threading.Timer(_CLIENT_S, self._disconnect)
        limit.daemon = True
        limit.start()
        try:
            super().handle()
        finally:
            limit.cancel()

    def _disconnect(self) -> None:
        with contextlib.suppress(OSError):  # the connection has just ended
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing, so that requests are not logged to standard error, which belongs to the engine."""


class _Server(WSGIServer):
    def server_bind(self) -> None:
        """Binds without looking up the host name, which can take many seconds."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of a connection instead of printing them to standard error, which belongs to the engine."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class PrometheusEndpoint:
    """HTTP server for `http://address:port/metrics`, bound on construction.

    Args:
        address: address to listen on.
        labels: labels added to every sample.
        families: returns the agent's current metrics; runs on the endpoint's thread.

    Raises:
        ConfigError: no port is free, or prometheus-client is not installed.
    """

    def __init__(self, address: Address, labels: dict[str, str], families: Families) -> None:
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
        except ImportError:
            text = "metrics_endpoint needs prometheus-client: pip install 'kvctl[prometheus]'"
            raise ConfigError(text) from None
        registry = CollectorRegistry(auto_describe=False)
        _register(registry, labels, families)
        ProcessCollector(registry=registry)
        self._server = _bind(address, make_wsgi_app(registry))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kvctl-metrics", daemon=True
        )

    @property
    def url(self) -> str:
        """URL of the metrics, with the actual port."""
        host, port = self._server.server_address[:2]
        shown = str(host)
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/metrics"

    def start(self) -> None:
        """Starts the server's thread."""
        self._thread.start()

    def close(self) -> None:
        """Stops the server, after waiting at most 10 seconds for a scrape in progress."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(2 * _CLIENT_S)
        self._server.server_close()


def _bind(address: Address, app: Any) -> WSGIServer:
    kind = _Server6 if address.ip.version == 6 else _Server
    error: OSError | None = None
    for port in address.ports:
        try:
            return make_server(str(address.ip), port, app, kind, _Handler)
        except OSError as caught:
            error = caught
    assert error is not None
    raise ConfigError(f"cannot bind metrics_endpoint {address.text}: {error.strerror}")


def _register(registry: CollectorRegistry, labels: dict[str, str], families: Families) -> None:
    from prometheus_client.registry import Collector

    class Agent(Collector):
        """Prometheus collector that converts the agent's metrics at each scrape."""

        def collect(self) -> Iterable[Metric]:
            return [_metric(family, labels) for family in families() if family["samples"]]

    registry.register(Agent())


def _metric(family: MetricFamily, labels: dict[str, str]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    name, text, samples = family["name"], family["help"], family["samples"]
    names = [*labels, *samples[0]["labels"]]
    metric: Any
    match family["kind"]:
        case "counter":
            metric = CounterMetricFamily(name.removesuffix(_TOTAL), text, labels=names)
        case "gauge":
            metric = GaugeMetricFamily(name, text, labels=names)
        case _:
            metric = HistogramMetricFamily(name, text, labels=names)
    for sample in samples:
        values = [*labels.values(), *sample["labels"].values()]
        if "buckets" in sample:
            buckets = [("+Inf" if bound is None else repr(bound), total) for bound, total in sample["buckets"]]
            metric.add_metric(values, buckets, sum_value=sample["sum"])
        elif sample["value"] is not None:
            metric.add_metric(values, sample["value"])
    return metric  # type: ignore[no-any-return]
