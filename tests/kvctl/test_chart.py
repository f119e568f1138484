"""The chart: rendered by a real helm, valid by the schemas of its kinds, and consistent with kvctl and its docs."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.kvctl.client.discovery.conftest import agents, keys
from tests.support.charts import CHART, TOOLS_PATH, helm, render, which
from tests.support.kubectl import install_plugin
from tests.support.kubernetes_api import KubernetesApi, pod

__all__ = ["agents", "keys"]

pytestmark = pytest.mark.skipif(which("helm") is None, reason="helm is not installed")
ROOT = CHART.parents[1]
DOCS = ROOT / "docs"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
EVERYTHING: dict[str, Any] = {
    "workers": {"matchLabels": {"app": "engine"}, "ranksPerPod": 4},
    "rbac": {"subjects": [{"kind": "Group", "name": "oncall"}, {"kind": "User", "name": "alice"}]},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"annotations": {"grafana_folder": "LLM"}},
    "networkPolicy": {"enabled": True, "ports": [8100]},
    "toolbox": {"enabled": True, "image": "registry.example/kvctl:1", "imagePullSecrets": [{"name": "pull"}]},
}
CUSTOM = "monitoring.coreos.com/v1"


def of_kind(kind: str, values: dict[str, Any] | None = None) -> dict[str, Any]:
    (found,) = (each for each in render(EVERYTHING if values is None else values) if each["kind"] == kind)
    return found


def test_helm_finds_no_fault_in_it() -> None:
    for values in ({}, EVERYTHING):
        outcome = helm("lint", str(CHART), "--strict", values=values)
        assert outcome.returncode == 0, outcome.stdout


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_what_it_makes_is_valid(version: str) -> None:
    kinds = []
    for document in render(EVERYTHING):
        assert document["metadata"]["namespace"] == "kvctl"
        kinds.append(document["kind"])
        if document["apiVersion"] != CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)
    assert sorted(kinds) == [
        "ConfigMap", "Deployment", "NetworkPolicy", "PodMonitor", "PrometheusRule", "Role", "Role", "RoleBinding",
        "RoleBinding", "ServiceAccount",
    ]  # fmt: skip


def test_by_default_it_needs_neither_custom_resources_nor_an_image() -> None:
    assert sorted(each["kind"] for each in render({})) == ["ConfigMap", "Role"]


@pytest.mark.full  # the models are 2 MB of Python
@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule"])
def test_a_custom_resource_is_valid_by_the_operators_definition(kind: str) -> None:
    model = getattr(importlib.import_module("cloudcoil.models.prometheus_operator.v1"), kind)
    for values in (EVERYTHING, {**EVERYTHING, "workers": {"ranksPerPod": 1}, "networkPolicy": {}}):
        document = of_kind(kind, values)
        # The models ignore unknown fields, so none may get lost.
        assert model.model_validate(document).model_dump(mode="json", by_alias=True, exclude_unset=True) == document
        with pytest.raises(ValueError, match="validation error"):
            model.model_validate({**document, "spec": {"groups": [{}], "podMetricsEndpoints": "none"}})


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"worker": {}}, "worker"),
        ({"workers": {"ranksPerPod": "two"}}, "/workers/ranksPerPod"),
        ({"podMonitor": {"enable": True}}, "enable"),
        ({"workers": {"ranksPerPod": 11}}, "/workers/ranksPerPod"),
        ({"workers": {"metricsPort": 65530}}, "/workers/metricsPort"),
        ({"workers": {"adminPort": 65530}}, "/workers/adminPort"),
        ({"networkPolicy": {"enabled": True, "ports": [8100]}}, "/workers/matchLabels"),
        ({"networkPolicy": {"enabled": True}, "workers": {"matchLabels": {"app": "engine"}}}, "/networkPolicy/ports"),
        ({"toolbox": {"enabled": True}}, "/toolbox/image"),
    ],
)
def test_wrong_values_are_refused_by_their_schema(values: dict[str, Any], place: str) -> None:
    outcome = helm("template", str(CHART), values=values)
    assert outcome.returncode != 0
    assert place in outcome.stderr


@pytest.mark.parametrize(
    "path", ["workers", "workers.matchLabels", "rbac", "podMonitor", "toolbox.image", "toolbox.keys"]
)
def test_a_value_cannot_be_removed(path: str) -> None:
    """Helm removes a default that is overridden by null; a policy without labels would take every pod."""
    outcome = helm("template", str(CHART), "--set", f"{path}=null", values=EVERYTHING)
    assert outcome.returncode != 0
    assert f"missing property '{path.rpartition('.')[2]}'" in outcome.stderr


def test_the_schema_has_every_value() -> None:
    def compare(value: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        properties = schema["properties"]
        assert not schema["additionalProperties"], path
        assert set(value) == set(properties) - {"global"} == set(schema["required"]), path
        for name, each in value.items():
            if "properties" in properties[name]:
                compare(each, properties[name], f"{path}.{name}")

    compare(VALUES, SCHEMA, "")


def test_the_rules_and_the_dashboard_are_those_of_the_docs() -> None:
    rules = yaml.safe_load((DOCS / "prometheus" / "kvctl-alerts.yml").read_text())
    assert of_kind("PrometheusRule")["spec"] == rules
    ((name, text),) = of_kind("ConfigMap")["data"].items()
    assert name.endswith(".json")  # of which the sidecar makes files
    assert json.loads(text) == runpy.run_path(str(DOCS / "dashboard.py"))["provisioned"]()


def test_the_monitor_has_an_endpoint_for_every_rank_of_a_pod() -> None:
    endpoints = of_kind("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert [each["port"] for each in endpoints] == ["kvctl-metrics", *(f"kvctl-metrics-{rank}" for rank in (1, 2, 3))]
    everywhere = of_kind("PodMonitor", {"podMonitor": {"enabled": True}})["spec"]
    assert everywhere["selector"] == {}
    assert everywhere["podMetricsEndpoints"][-1]["port"] == "kvctl-metrics-7"
    most = SCHEMA["properties"]["workers"]["properties"]["ranksPerPod"]["maximum"]
    many = of_kind("PodMonitor", {"podMonitor": {"enabled": True}, "workers": {"ranksPerPod": most}})
    last = many["spec"]["podMetricsEndpoints"][-1]
    assert last["port"] == "kvctl-metrics-9"
    assert len(last["port"]) == 15  # what Kubernetes allows


def test_names_and_values_are_texts_whatever_they_contain() -> None:
    """YAML takes unquoted digits for a number, and a comma within braces for the next field."""
    given = {
        **EVERYTHING,
        "podMonitor": {"enabled": True, "labels": {"app.kubernetes.io/name": "mine"}},
        "toolbox": {"enabled": True, "image": "registry.example/kvctl:1", "keys": "a, optional: true"},
    }
    rendered = render(given, namespace="456", name="123")
    for document in rendered:
        metadata = document["metadata"]
        assert (metadata["name"].partition("-")[0], metadata["namespace"]) == ("123", "456")
        assert metadata["labels"]["app.kubernetes.io/instance"] == "123"
        if document["kind"] == "PodMonitor":
            assert metadata["labels"]["app.kubernetes.io/name"] == "mine"
        elif document["kind"] == "RoleBinding":
            assert document["roleRef"]["name"] == metadata["name"]
            assert {each.get("namespace", "456") for each in document["subjects"]} == {"456"}
        elif document["kind"] == "Deployment":
            assert (
                document["spec"]["selector"]["matchLabels"].items()
                <= document["spec"]["template"]["metadata"]["labels"].items()
            )
            keys, _ = document["spec"]["template"]["spec"]["volumes"]
            assert keys["secret"] == {"secretName": "a, optional: true", "defaultMode": 0o400}
    outcome = helm("template", "123", str(CHART), "--namespace", "456", values=given)
    # Decoders differ about a key that is there twice; PyYAML takes the last one.
    assert outcome.stdout.partition("kind: PodMonitor")[2].partition("spec:")[0].count("app.kubernetes.io/name") == 1


def test_who_may_find_the_agents() -> None:
    find = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    forward = {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["get", "create"]}
    documents = render(EVERYTHING)
    rules = {each["metadata"]["name"]: each["rules"] for each in documents if each["kind"] == "Role"}
    account = of_kind("ServiceAccount")["metadata"]["name"]
    assert rules == {"kvctl": [find, forward], account: [find]}  # the toolbox connects to the pods' addresses
    subjects = {
        each["roleRef"]["name"]: [(subject["kind"], subject["name"]) for subject in each["subjects"]]
        for each in documents
        if each["kind"] == "RoleBinding"
    }
    assert subjects == {"kvctl": [("Group", "oncall"), ("User", "alice")], account: [("ServiceAccount", account)]}
    assert of_kind("Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == account


@pytest.mark.parametrize("path", ["docs/kubernetes.md", "examples/kubernetes/values.yaml"])
def test_the_commands_of_a_page_install_it(path: str) -> None:
    """They render it, because there is no cluster."""
    commands = re.findall(r"^(?:#   )?helm upgrade --install (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)
        rendered = helm("template", *(word for word in words if word != "--reuse-values"), folder=ROOT)
        assert "kind: Role" in rendered.stdout, rendered.stderr
        assert ("kind: PodMonitor" in rendered.stdout) == ("-f" in words)
        assert ("kind: Deployment" in rendered.stdout) == ("toolbox.enabled=true" in command)


def test_the_commands_of_its_notes_work(
    tmp_path: Path, agents: Callable[[str], Any], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = helm("install", "kvctl", str(CHART), "--dry-run=client", "--namespace", "serving", values=EVERYTHING)
    assert installed.returncode == 0, installed.stderr
    commands = re.findall(r"^  (kubectl .+)$", installed.stdout.partition("NOTES:")[2], re.MULTILINE)
    plugin, in_cluster = commands[:-1], commands[-1]
    assert len(plugin) == 2
    deployment = of_kind("Deployment")["metadata"]["name"]
    assert in_cluster == f"kubectl exec -n serving deploy/{deployment} -- kvctl status"  # test_image.py runs it
    install_plugin(tmp_path / "bin")
    api = KubernetesApi()
    try:
        env = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{TOOLS_PATH}",
            "KUBECONFIG": str(api.kubeconfig(tmp_path / "kubeconfig")),
            "KVCTL_TIMEOUT": "30s",
        }
        api.pods = [
            pod(name, int(agents(name).remote_address.rpartition(":")[2])) for name in ("prefill-0", "decode-0")
        ]
        for command in plugin:
            words = shlex.split(command)
            outcome = subprocess.run(words, env=env, cwd=keys, capture_output=True, text=True, timeout=120)
            assert "Traceback" not in outcome.stderr
            assert outcome.returncode in ((0, 1) if words[-1] == "doctor" else (0,)), outcome.stderr
            assert re.search(r"decode-0|\b2 agents\b", outcome.stdout)
    finally:
        api.close()
