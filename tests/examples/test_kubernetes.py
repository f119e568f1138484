"""examples/kubernetes: valid by the API's schemas, consistent with kvctl and its chart, and runnable."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvctl_agent.contract.config import KEYS_BY_NAME, TOOL_VARIABLES
from tests.support.charts import render, which
from tests.support.polling import until

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = sorted(path for path in EXAMPLES.glob("*/*.yaml") if path.name != "kustomization.yaml")
DOCUMENTS = [(path, document) for path in FILES for document in yaml.safe_load_all(path.read_text())]
WORKLOADS = [(path, each) for path, each in DOCUMENTS if each["kind"] in ("StatefulSet", "Deployment")]
AGENTS = [(path, each) for path, each in WORKLOADS if each["metadata"]["name"] != "sglang-router"]
SGLANG = [each for path, each in AGENTS if path.parent.name == "sglang"]  # their HTTP ports are for routers
WAIT_S = 60.0


def name_of(value: Any) -> str:
    return f"{value.parent.name}/{value.stem}" if isinstance(value, Path) else value["metadata"]["name"]


@pytest.mark.parametrize(("path", "document"), DOCUMENTS, ids=name_of)
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_a_manifest_is_valid(path: Path, document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_wrong_field_would_be_noticed() -> None:
    wrong = json.loads(json.dumps(WORKLOADS[0][1]))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


@pytest.mark.parametrize("folder", ["synthetic", "sglang"])
def test_a_kustomization_has_all_files(folder: str) -> None:
    listed = yaml.safe_load((EXAMPLES / folder / "kustomization.yaml").read_text())["resources"]
    there = {path.name for path in (EXAMPLES / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == there
    if (kubectl := which("kubectl")) is not None:
        built = subprocess.run([kubectl, "kustomize", EXAMPLES / folder], capture_output=True, timeout=60, check=True)
        for document in yaml.safe_load_all(built.stdout):
            kubernetes_validate.validate(document, "1.37", strict=True)


@pytest.mark.skipif(which("helm") is None, reason="helm is not installed")
def test_the_chart_selects_the_workers_and_their_ports() -> None:
    made = {
        each["kind"]: each["spec"]
        for each in render(yaml.safe_load((EXAMPLES / "values.yaml").read_text()))
        if "spec" in each
    }
    monitored = {each["port"] for each in made["PodMonitor"]["podMetricsEndpoints"]}
    peers, outside = made["NetworkPolicy"]["ingress"]
    assert peers == {"from": [{"podSelector": made["NetworkPolicy"]["podSelector"]}]}
    opened = {port for each in outside["ports"] for port in range(each["port"], each.get("endPort", each["port"]) + 1)}
    for _, document in AGENTS:
        labels = document["spec"]["template"]["metadata"]["labels"]
        for selector in (made["PodMonitor"]["selector"], made["NetworkPolicy"]["podSelector"]):
            assert selector["matchLabels"].items() <= labels.items()
        ports = {port["name"]: port["containerPort"] for port in worker_of(document)["ports"]}
        assert {name for name in ports if name.startswith("kvctl-metrics")} <= monitored
        open_to_all = {port for name, port in ports.items() if name.startswith("kvctl-") or document in SGLANG}
        assert open_to_all <= opened


def worker_of(document: dict[str, Any]) -> dict[str, Any]:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


@pytest.mark.parametrize(("path", "document"), AGENTS, ids=name_of)
def test_settings_and_ports_are_those_of_kvctl(path: Path, document: dict[str, Any]) -> None:
    container = worker_of(document)
    env = {each["name"]: each.get("value") for each in container["env"]}
    known = {key.environment for key in KEYS_BY_NAME.values()} | set(TOOL_VARIABLES)
    assert {name for name in env if name.startswith("KVCTL_")} <= known
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name, variable in (("kvctl-admin", "KVCTL_ADMIN_ENDPOINT"), ("kvctl-metrics", "KVCTL_METRICS_ENDPOINT")):
        first = int(env[variable].removesuffix("+").rpartition(":")[2])
        found = sorted(port for each, port in ports.items() if each.startswith(name))
        assert found == list(range(first, first + len(found)))
        assert (len(found) > 1) == env[variable].endswith("+")
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/livez", "port": "kvctl-metrics"}
    service = document["metadata"]["name"]
    labels = document["spec"]["template"]["metadata"]["labels"]
    assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels["kvctl.example/fleet"] == "true"
    for _, other in DOCUMENTS:
        if other["kind"] == "Service" and other["metadata"]["name"] == service:
            assert other["spec"]["selector"].items() <= labels.items()
            assert {each["port"] for each in other["spec"]["ports"]} <= set(ports.values())


@pytest.mark.parametrize(("path", "document"), AGENTS, ids=name_of)
def test_the_hook_ends_before_kubernetes_kills(path: Path, document: dict[str, Any]) -> None:
    (*_, script) = worker_of(document)["lifecycle"]["preStop"]["exec"]["command"]
    match = re.fullmatch(r"sleep (\d+); exec kvctl drain --all --yes --wait (\d+)s", script)
    assert match is not None
    grace_s = document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(match[1]) + int(match[2]) + 15 <= grace_s


@pytest.mark.parametrize("folder", [".", "examples/kubernetes"])
def test_an_image_copies_what_exists_and_is_not_ignored(folder: str) -> None:
    root = EXAMPLES.parents[1]
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (root / folder / "Dockerfile").read_text(), re.MULTILINE)
    kept = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in itertools.chain.from_iterable(line.split() for line in copies):
        assert (root / source).exists(), source
        assert source in kept


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's prometheus is not installed")
def test_promtool_likes_the_scrape_configuration(tmp_path: Path) -> None:
    config = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    # Debian builds Prometheus without discovery in Kubernetes.
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ["promtool", "check", "config", "--syntax-only", tmp_path / "prometheus.yml"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


# ---- the containers of the synthetic fleet, without containers -------------------------------------------------------


class Pod:
    """Runs the container of a manifest as a process: its environment, probes and preStop hook."""

    def __init__(self, file: str, name: str, ip: str, replace: Callable[[str], str], **env: str) -> None:
        (document,) = (each for path, each in WORKLOADS if (path.parent.name, path.stem) == ("synthetic", file))
        self.container = worker_of(document)
        self.ip = ip
        fields = {
            "metadata.name": name,
            "status.podIP": ip,
            "spec.nodeName": f"node-{name}",
            "metadata.labels['apps.kubernetes.io/pod-index']": name.rpartition("-")[2],
        }
        given: dict[str, str] = {}
        for each in self.container["env"]:
            value = each.get("value")
            if value is None:
                value = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            value = re.sub(r"\$\((\w+)\)", lambda match: given[match[1]], value)
            given[each["name"]] = replace(value).replace("0.0.0.0", ip)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, **given, **env, "KVCTL_SOCKET_DIR": f"{env['RUN']}/{name}"}
        command = [sys.executable, "-u", EXAMPLES / "worker.py"]
        self.process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, text=True)

    def probe(self, kind: str) -> int:
        target = self.container[kind]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        try:
            with urllib.request.urlopen(
                f"http://{self.ip}:{ports[target['port']]}{target['path']}", timeout=5
            ) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except OSError:
            return 0

    def answers(self, kind: str) -> bool:
        return self.probe(kind) == 200

    def pre_stop(self) -> subprocess.CompletedProcess[str]:
        command = self.container["lifecycle"]["preStop"]["exec"]["command"]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120)

    def terminate(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=60)
        return out


@pytest.fixture
def pods(tmp_path: Path, socket_dir: Path) -> Iterator[dict[str, Pod]]:
    """Two prefill ranks and a decode rank, at addresses of their own of this host."""
    kvctl = [Path(sys.executable).parent / "kvctl"]
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    for name in ("fleet", "default"):
        subprocess.run([*kvctl, "key", "new", name], env=env, check=True, capture_output=True, timeout=60)
    keys = tmp_path / "kvctl" / "keys"
    (keys / "clients").write_text(f"read {(keys / 'default.pub').read_text()}")
    net = next(net for net in range(16, 255) if all(_free(f"127.0.{net}.{host}") for host in (1, 2, 3)))
    ips = {f"prefill-{number}": f"127.0.{net}.{number + 1}" for number in (0, 1)}

    def replace(value: str) -> str:
        for name, ip in ips.items():
            value = value.replace(f"{name}.prefill", ip)
        return value.replace("/etc/kvctl", str(keys))

    common = {"RUN": str(socket_dir), "KVCTL_TRANSPORT": "nixl"}
    made: dict[str, Pod] = {}
    try:
        for name, ip in ips.items():
            made[name] = Pod("prefill", name, ip, replace, **common)
        made["decode-x"] = Pod("decode", "decode-x", f"127.0.{net}.3", replace, **common)
        yield made
    finally:
        for pod in made.values():
            if pod.process.poll() is None:
                pod.terminate()


def _free(ip: str) -> bool:
    for port in (7000, 7311, 8000, 9400):
        with socket.socket() as each:
            try:
                each.bind((ip, port))
            except OSError:
                return False
    return True


def test_the_synthetic_fleet_runs_drains_and_ends(pods: dict[str, Pod], tmp_path: Path) -> None:
    for name, pod in pods.items():
        until(partial(pod.answers, "startupProbe"), f"{name} is alive", within_s=WAIT_S)
    for name, pod in pods.items():
        until(partial(pod.answers, "readinessProbe"), f"{name} is ready", within_s=WAIT_S)
    decode = pods["decode-x"]
    url = f"http://{decode.ip}:9400/metrics"

    def done() -> bool:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        return bool(re.search(r'kvctl_rooms_finished_total\{.*host="node-decode-x".*result="Success".*\} [1-9]', text))

    until(done, "a room has succeeded", within_s=WAIT_S)
    command = [Path(sys.executable).parent / "kvctl", "-e", f"tcp://{decode.ip}:7311", "status", "-o", "json"]
    keys = {"XDG_CONFIG_HOME": str(tmp_path), "KVCTL_SERVER_KEY": str(tmp_path / "kvctl" / "keys" / "fleet.pub")}
    asked = subprocess.run(command, env={**os.environ, **keys}, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, asked.stderr
    assert "node-decode-x" in asked.stdout
    hook = decode.pre_stop()
    assert (hook.returncode, hook.stderr) == (0, "kvctl: 1 agent drained\n")
    assert decode.probe("readinessProbe") == 503
    assert decode.probe("livenessProbe") == 200
    out = decode.terminate()
    assert "corrupt" not in out
    assert out.endswith("stopped\n")
    assert decode.process.returncode == 0
