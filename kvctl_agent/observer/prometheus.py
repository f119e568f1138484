"""Page `/metrics`: the metrics of the admin command `metrics`, and process metrics, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kvctl_agent.contract.extras import install
from kvctl_agent.contract.snapshots import MetricFamily
from kvctl_agent.host.http_server import Answer, Page, text_answer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

Families = Callable[[], list[MetricFamily]]

_TOTAL = "_total"
_MISSING = f"metrics need prometheus-client: {install('prometheus')}\n"


def metrics_page(labels: dict[str, str], families: Families, pid: int | str = "self") -> Page:
    """Returns the page; it answers 501 with the reason if prometheus-client is not installed.

    Args:
        labels: labels added to every sample.
        families: returns the agent's current metrics; called by one client at a time.
        pid: id of the process whose metrics are added, as in /proc; 0: none.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        return partial(text_answer, HTTPStatus.NOT_IMPLEMENTED, _MISSING)
    encode, content_type = choose_encoder("")
    registry = CollectorRegistry(auto_describe=False)
    _register(registry, labels, families)
    if pid:
        ProcessCollector(pid=lambda: pid, registry=registry)
    return lambda: Answer(HTTPStatus.OK, encode(registry), content_type)


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
