"""The endpoint that Prometheus scrapes: what it serves, where it may listen, and that nobody can hold it up."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvctl_agent.contract.metrics import METRICS
from kvctl_agent.errors import ConfigError
from kvctl_agent.export import Exports
from kvctl_agent.export.prometheus import Address, PrometheusEndpoint
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    counted = Metrics()
    for metric in METRICS:
        labels = tuple("x" for _ in metric.labels)
        match metric.kind:
            case "counter":
                counted.add(metric.name, 3, *labels)
            case "gauge":
                counted.set(metric.name, 7, *labels)
            case _:
                counted.observe(metric.name, 0.003, *labels)
    return counted


@pytest.fixture
def endpoint(metrics: Metrics) -> Iterator[PrometheusEndpoint]:
    serving = PrometheusEndpoint(Address("127.0.0.1:0"), {"agent": "decode-0", "role": "decode"}, metrics.snapshot)
    serving.start()
    yield serving
    serving.close()


def scrape(endpoint: PrometheusEndpoint) -> dict[str, Any]:
    with urllib.request.urlopen(endpoint.url, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def test_every_declared_metric_is_served_under_its_own_name(endpoint: PrometheusEndpoint) -> None:
    families = scrape(endpoint)
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert sample.labels["agent"] == "decode-0"
            assert sample.labels["role"] == "decode"
            assert set(sample.labels) <= {"agent", "role", "le", *metric.labels}
        values = {sample.name: sample.value for sample in family.samples if "le" not in sample.labels}
        if metric.kind == "histogram":
            assert values == {f"{metric.name}_count": 1, f"{metric.name}_sum": pytest.approx(0.003)}
        else:
            assert values == {metric.name: 3 if metric.kind == "counter" else 7}


def test_no_label_holds_a_room() -> None:
    assert not {"room", "nonce", "peer"} & {label for metric in METRICS for label in metric.labels}


def test_the_process_is_there_too(endpoint: PrometheusEndpoint) -> None:
    families = scrape(endpoint)
    assert families["process_open_fds"].samples[0].value > 0
    assert families["process_max_fds"].samples[0].value > 0


def test_a_gauge_that_is_not_known_is_left_out() -> None:
    metrics = Metrics()
    metrics.set("kvctl_quarantined_bytes", None)
    endpoint = PrometheusEndpoint(Address("127.0.0.1:0"), {"agent": "a", "role": "decode"}, metrics.snapshot)
    endpoint.start()
    try:
        family = scrape(endpoint).get("kvctl_quarantined_bytes")
        assert family is None or not family.samples
    finally:
        endpoint.close()


@contextmanager
def dripping(url: str) -> Iterator[None]:
    """A client that goes on sending, a byte at a time, and never comes to the end of its request."""
    host, port = url.removeprefix("http://").removesuffix("/metrics").split(":")
    stop = threading.Event()

    def drip(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                client.send(b"G")

    with socket.create_connection((host, int(port))) as client:
        thread = threading.Thread(target=drip, args=(client,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def test_a_client_that_says_nothing_holds_nobody_up_for_ever(
    endpoint: PrometheusEndpoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvctl_agent.export.prometheus._CLIENT_S", 0.2)
    host, port = endpoint.url.removeprefix("http://").removesuffix("/metrics").split(":")
    with socket.create_connection((host, int(port))), dripping(endpoint.url):
        assert scrape(endpoint)
    assert capfd.readouterr() == ("", "")


def test_a_client_that_never_ends_does_not_keep_the_agent_from_closing(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvctl_agent.export.prometheus._CLIENT_S", 0.2)
    endpoint = PrometheusEndpoint(Address("127.0.0.1:0"), {"agent": "a", "role": "decode"}, metrics.snapshot)
    endpoint.start()
    with dripping(endpoint.url):
        closing = threading.Thread(target=endpoint.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()


def test_no_resolver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def getfqdn(name: str = "") -> str:
        raise AssertionError(f"looked {name} up")

    monkeypatch.setattr(socket, "getfqdn", getfqdn)
    PrometheusEndpoint(Address("127.0.0.1:0"), {}, Metrics().snapshot).close()


@pytest.mark.parametrize("text", ["", "9400", ":9400", "localhost:9400", "127.0.0.1:x", "127.0.0.1:70000", "1.2.3.4"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="metrics_endpoint"):
        Address(text)


def test_a_plus_takes_the_next_free_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        families = Metrics().snapshot
        with pytest.raises(ConfigError, match=f"cannot bind metrics_endpoint 127.0.0.1:{port}: Address already in use"):
            PrometheusEndpoint(Address(f"127.0.0.1:{port}"), {}, families)
        endpoint = PrometheusEndpoint(Address(f"127.0.0.1:{port}+"), {}, families)
        try:
            assert int(endpoint.url.rpartition(":")[2].removesuffix("/metrics")) > port
        finally:
            endpoint.close()


def settings(**given: Any) -> dict[str, Any]:
    return {"metrics_endpoint": "", "otel_endpoint": "", "insecure": False, **given}


def test_others_may_not_reach_it_unless_that_is_wanted() -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        Exports(settings(metrics_endpoint="0.0.0.0:9400"), "decode-0", "decode")
    Exports(settings(metrics_endpoint="0.0.0.0:9400", insecure=True), "decode-0", "decode")


def test_nothing_is_opened_unless_it_is_asked_for() -> None:
    exports = Exports(settings(), "decode-0", "decode")
    telemetry = Telemetry("decode-0", "decode", history=1, timeline_events=1, recorder_events=1)
    exports.start(telemetry.metrics.snapshot, telemetry)
    assert exports.metrics_url == ""
    assert telemetry.on_finish is None
    exports.close()


def test_opened_and_closed(metrics: Metrics) -> None:
    exports = Exports(settings(metrics_endpoint="[::1]:0"), "decode-0", "decode")
    telemetry = Telemetry("decode-0", "decode", history=1, timeline_events=1, recorder_events=1)
    exports.start(metrics.snapshot, telemetry)
    try:
        assert exports.metrics_url.startswith("http://[::1]:")
        with urllib.request.urlopen(exports.metrics_url, timeout=60) as answer:
            assert b"kvctl_rooms_opened_total" in answer.read()
    finally:
        exports.close()
        exports.close()
