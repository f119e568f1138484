"""What Prometheus scrapes: every metric under its own name, with the labels of the agent."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvctl_agent.contract.metrics import METRICS
from kvctl_agent.observer.metrics import Metrics
from kvctl_agent.observer.prometheus import metrics_page

LABELS = {"agent": "decode-0", "role": "decode", "host": "node-7"}


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


def scrape(metrics: Metrics) -> dict[str, Any]:
    answer = metrics_page(LABELS, metrics.snapshot)()
    assert answer.status == 200
    assert answer.content_type.startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(answer.body.decode())}


def test_every_declared_metric_is_served_under_its_own_name(metrics: Metrics) -> None:
    families = scrape(metrics)
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert {label: sample.labels[label] for label in LABELS} == LABELS
            assert set(sample.labels) <= {*LABELS, "le", *metric.labels}
        values = {sample.name: sample.value for sample in family.samples if "le" not in sample.labels}
        if metric.kind == "histogram":
            assert values == {f"{metric.name}_count": 1, f"{metric.name}_sum": pytest.approx(0.003)}
        else:
            assert values == {metric.name: 3 if metric.kind == "counter" else 7}


def test_the_process_is_there_too(metrics: Metrics) -> None:
    families = scrape(metrics)
    assert families["process_open_fds"].samples[0].value > 0
    assert families["process_max_fds"].samples[0].value > 0


def test_a_gauge_that_is_not_known_is_left_out() -> None:
    metrics = Metrics()
    metrics.set("kvctl_quarantined_bytes", None)
    family = scrape(metrics).get("kvctl_quarantined_bytes")
    assert family is None or not family.samples


def test_without_the_package_the_answer_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = metrics_page(LABELS, Metrics().snapshot)()
    assert answer.status == 501
    assert b"pip install '.[prometheus]'" in answer.body
