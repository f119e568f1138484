"""What is offered to Prometheus and Grafana, tried on a real Prometheus: scraped, every query run, the rules loaded."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.health.codes import CODES
from kvctl_agent.contract.addresses import parse_listening
from kvctl_agent.contract.http_server import PageServer
from kvctl_agent.contract.metrics import METRICS_BY_NAME, Metric
from kvctl_agent.export.prometheus import metrics_page
from kvctl_agent.telemetry.metrics import Metrics

DOCS = Path(__file__).parents[1] / "docs"
RULES = DOCS / "prometheus" / "kvctl-alerts.yml"
EXPRESSIONS: list[str] = runpy.run_path(str(DOCS / "dashboard.py"))["expressions"]()
ALERTS = {code.name: code.alert for code in CODES if code.alert}
PATIENCE_S = 60.0

installed = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's prometheus is not installed")


def metric_of(name: str) -> Metric | None:
    return METRICS_BY_NAME.get(name) or METRICS_BY_NAME.get(re.sub(r"_(bucket|sum|count)$", "", name))


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *ALERTS.values()])
def test_a_query_names_metrics_and_labels_that_agents_have(expression: str) -> None:
    names = set(re.findall(r"\b(?:kvctl|process)_\w+", re.sub(r'"[^"]*"', "", expression)))
    assert names
    for name in names:
        if name.startswith("process_"):
            assert name in {"process_open_fds", "process_max_fds", "process_resident_memory_bytes"}, name
            continue
        metric = metric_of(name)
        assert metric is not None, name
        for labels in re.findall(name + r"\{([^}]*)\}", expression):
            for label in re.findall(r"(\w+)(?:=|!=|=~|!~)\"", labels):
                assert label in {"agent", "role", "host", "instance", "job", "le", *metric.labels}, (name, label)


def test_the_dashboard_has_a_place_for_every_panel() -> None:
    board = json.loads((DOCS / "grafana" / "kvctl.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


class Scraped:
    """A Prometheus that scrapes one endpoint per role, each of them a real one with numbers that grow."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def value(self, expression: str) -> list[Any]:
        result: list[Any] = self.ask("/api/v1/query", query=expression)["result"]
        return result


def count(metrics: Metrics) -> None:
    """A little more of everything."""
    for metric in METRICS_BY_NAME.values():
        labels = tuple({"result": "Success", "state": "Transferring"}.get(label, "x") for label in metric.labels)
        match metric.kind:
            case "counter":
                metrics.add(metric.name, 5, *labels)
            case "gauge":
                metrics.set(metric.name, 7, *labels)
            case _:
                metrics.observe(metric.name, 0.003, *labels)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    directory = tmp_path_factory.mktemp("prometheus")
    endpoints: list[PageServer] = []
    counted = {"prefill": Metrics(), "decode": Metrics()}
    for role, metrics in counted.items():
        count(metrics)
        endpoints.append(
            PageServer(
                parse_listening("127.0.0.1:0"),
                {"/metrics": metrics_page({"agent": f"{role}-0", "role": role, "host": "node-7"}, metrics.snapshot)},
                f"metrics-{role}",
            )
        )
        endpoints[-1].start()
    targets = [endpoint.url.removeprefix("http://") for endpoint in endpoints]
    scrape = {"job_name": "kvctl", "static_configs": [{"targets": targets}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [scrape],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (directory / "log").open("w")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    scraped = Scraped(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for metrics in counted.values():
                count(metrics)
            try:
                rates = scraped.value("rate(kvctl_room_seconds_count[30s]) > 0")
            except OSError:
                rates = []
            if len(rates) == len(counted):
                break
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, "Prometheus has scraped both agents twice"
            time.sleep(0.2)
        yield scraped
    finally:
        process.terminate()
        process.wait(30)
        log.close()
        for endpoint in endpoints:
            endpoint.close()


@installed
def test_every_panel_has_something_to_show(prometheus: Scraped) -> None:
    for expression in EXPRESSIONS:
        asked = re.sub(r"\$(host|instance|agent)", ".*", expression.replace("$__rate_interval", "30s"))
        assert prometheus.value(asked), expression


@installed
def test_the_variables_of_the_dashboard_have_values(prometheus: Scraped) -> None:
    board = json.loads((DOCS / "grafana" / "kvctl.json").read_text())
    variables = [each for each in board["templating"]["list"] if each["type"] == "query"]
    assert [each["name"] for each in variables] == ["host", "instance", "agent"]
    for variable in variables:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
        assert found is not None
        selector = re.sub(r"\$\w+", ".*", found[1])
        values = {series[found[2]] for series in prometheus.ask("/api/v1/series", **{"match[]": selector})}
        assert {"host": {"node-7"}, "agent": {"prefill-0", "decode-0"}}.get(found[2], values) == values
        assert values


@installed
def test_an_alert_names_the_agent_and_its_host(prometheus: Scraped) -> None:
    found = prometheus.value(ALERTS["KV_INTERNAL_ERROR"])
    assert {(each["metric"]["agent"], each["metric"]["host"]) for each in found} == {
        ("prefill-0", "node-7"),
        ("decode-0", "node-7"),
    }


@installed
def test_the_rules_load_and_can_be_evaluated(prometheus: Scraped) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        (group,) = prometheus.ask("/api/v1/rules")["groups"]
        if all(rule["health"] != "unknown" for rule in group["rules"]):
            break
        assert time.monotonic() < deadline, "every rule is evaluated"
        time.sleep(0.2)
    assert {rule["name"]: rule["health"] for rule in group["rules"]} == dict.fromkeys(ALERTS, "ok")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's prometheus is not installed")
def test_promtool_likes_the_rules() -> None:
    outcome = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert f"{len(ALERTS)} rules found" in outcome.stdout
