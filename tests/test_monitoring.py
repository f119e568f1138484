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
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from kvctl.health.codes import CODES
from kvctl_agent.contract.addresses import parse_listening
from kvctl_agent.contract.metrics import METRICS_BY_NAME, Metric
from kvctl_agent.host.http_server import PageServer
from kvctl_agent.observer.metrics import Metrics
from kvctl_agent.observer.prometheus import metrics_page

DOCS = Path(__file__).parents[1] / "docs"
RULES = DOCS / "prometheus" / "kvctl-alerts.yml"
DASHBOARD = runpy.run_path(str(DOCS / "dashboard.py"))
EXPRESSIONS: list[str] = DASHBOARD["expressions"]()
ALERTS = {code.name: code.alert for code in CODES if code.alert}
PATIENCE_S = 60.0

with_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's prometheus is not installed")
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
                known = {"agent", "role", "host", "instance", "namespace", "job", "le", *metric.labels}
                assert label in known, (name, label)


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


@pytest.mark.parametrize("form", ["imported", "provisioned"])
def test_grafanas_schema_has_every_field_of_the_dashboard(form: str) -> None:
    """The classes are made from the schema of Grafana 11.6; no package of a registry has a Grafana to import it."""
    register_default_plugins()
    board = {name: each for name, each in DASHBOARD[form]().items() if not name.startswith("__")}
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))

    def differences(ours: Any, theirs: Any, place: str) -> list[str]:
        """Returns the places of what the classes do not return as they have read it; they add defaults."""
        if isinstance(ours, dict):
            return [
                each for name, value in ours.items() for each in differences(value, theirs.get(name), f"{place}/{name}")
            ]
        if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
            pairs = enumerate(zip(ours, theirs, strict=True))
            return [each for number, pair in pairs for each in differences(*pair, f"{place}/{number}")]
        return [] if ours == theirs else [place]

    assert differences(board, read, "") == []
    assert differences({**board, "panel": []}, read, "") == ["/panel"]


def test_the_dashboard_asks_for_its_data_source_only_where_it_is_imported() -> None:
    """The format of an export for sharing: each input is used, and all plugins are named."""
    board = DASHBOARD["imported"]()
    text = json.dumps({name: each for name, each in board.items() if not name.startswith("__")})
    (asked,) = board["__inputs"]
    assert (asked["type"], asked["pluginId"]) == ("datasource", "prometheus")
    assert set(re.findall(r"\$\{(\w+)\}", text)) == {asked["name"]}
    plugins = {(each["type"], each["id"]) for each in board["__requires"]}
    panels = {("panel", panel["type"]) for panel in board["panels"] if panel["type"] != "row"}
    assert plugins == {("grafana", "grafana"), ("datasource", "prometheus"), *panels}
    provisioned = DASHBOARD["provisioned"]()
    assert not [name for name in provisioned if name.startswith("__")]
    (source,) = (each for each in provisioned["templating"]["list"] if each["type"] == "datasource")
    assert set(re.findall(r"\$\{(\w+)\}", json.dumps(provisioned))) == {source["name"]}
    assert (
        json.loads(json.dumps(provisioned["panels"]).replace(f"{{{source['name']}}}", f"{{{asked['name']}}}"))
        == board["panels"]
    )


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
    # Of two agents one is found in Kubernetes, as the label says; the queries and variables must find both.
    static = [{"targets": targets[:1], "labels": {"namespace": "serving"}}, {"targets": targets[1:]}]
    scrape = {"job_name": "kvctl", "static_configs": static}
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
        asked = re.sub(r"\$(namespace|host|instance|agent)", ".*", expression.replace("$__rate_interval", "30s"))
        assert prometheus.value(asked), expression


@installed
def test_the_variables_of_the_dashboard_have_values(prometheus: Scraped) -> None:
    board = json.loads((DOCS / "grafana" / "kvctl.json").read_text())
    variables = [each for each in board["templating"]["list"] if each["type"] == "query"]
    assert [each["name"] for each in variables] == ["namespace", "host", "instance", "agent"]
    for variable in variables:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert found is not None
        selector = re.sub(r"\$\w+", ".*", found[1])
        series = prometheus.ask("/api/v1/series", **{"match[]": selector})
        values = {each[found[2]] for each in series if found[2] in each}
        wanted = {"namespace": {"serving"}, "host": {"node-7"}, "agent": {"prefill-0", "decode-0"}}
        assert wanted.get(found[2], values) == values
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


@with_promtool
def test_promtool_likes_the_rules() -> None:
    outcome = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert f"{len(ALERTS)} rules found" in outcome.stdout


@with_promtool
def test_alerts_belong_to_one_namespace_or_to_none_without_kubernetes(tmp_path: Path) -> None:
    """Five fleets of two agents in one Prometheus; the last one is not in Kubernetes."""
    series: list[dict[str, str]] = []
    # Mean seconds of a part on the wire are tenths of these numbers; bytes a minute.
    fleets = {"fast": (1, 1, 9), "far": (9, 9, 9), "mixed": (1, 9, 9), "idle": (1, 1, 0), "": (1, 9, 9)}
    for namespace, (*seconds, bytes_) in fleets.items():
        for number, each in enumerate(seconds):
            labels = f'agent="decode-{number}",host="node-{number}",instance="{namespace}{number}:9400"'
            if namespace:
                labels += f',namespace="{namespace}",pod="decode-{number}"'
            growth = {
                f'kvctl_stage_seconds_sum{{stage="wire",{labels}}}': each,
                f'kvctl_stage_seconds_count{{stage="wire",{labels}}}': 10,
                f"kvctl_rooms_finished_total{{{labels}}}": 1,
                f"kvctl_part_bytes_total{{{labels}}}": bytes_,
                f"kvctl_internal_errors_total{{{labels}}}": number,
            }
            series += [{"series": name, "values": f"0+{step}x30"} for name, step in growth.items()]

    def agent(namespace: str) -> dict[str, str]:
        where = {"namespace": namespace, "pod": "decode-1"} if namespace else {}
        return {"agent": "decode-1", "host": "node-1", "instance": f"{namespace}1:9400", **where}

    expected: dict[str, list[dict[str, str]]] = {
        "KV_LANE_SLOW": [{"namespace": "mixed"}, {}],
        "KV_IDLE": [{"namespace": "idle"}],
        "KV_INTERNAL_ERROR": [agent(namespace) for namespace in fleets],
    }
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    tests = [
        {
            "eval_time": "20m",
            "alertname": name,
            "exp_alerts": [
                {"exp_labels": {**labels, **rules[name]["labels"]}, "exp_annotations": rules[name]["annotations"]}
                for labels in firing
            ],
        }
        for name, firing in expected.items()
    ]
    case = {"interval": "1m", "input_series": series, "alert_rule_test": tests}
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": [str(RULES)], "tests": [case]}))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yml")]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
