"""`kubernetes://`, the chart and examples/kubernetes with a real API server: RBAC, validation, port-forward.

It needs kube-apiserver and etcd in PATH, and is skipped without them: no package of a registry has the former. Debian's
source package `kubernetes` is complete; in that of Debian 12, cmd/kube-apiserver (1.20) builds with golang-1.19 once
openapi-gen has made pkg/generated/openapi. The node is a stand-in that answers port-forward as a kubelet does.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from kvctl.client.discovery import open_source
from kvctl.client.discovery.source import Found, SourceError
from kvctl.client.keys import NO_KEYS
from tests.support.charts import render, which
from tests.support.kubernetes_api import KubernetesApi, pod

PROGRAMS = ("kube-apiserver", "etcd", "openssl", "helm")
pytestmark = pytest.mark.skipif(
    any(which(program) is None for program in PROGRAMS), reason="kube-apiserver, etcd or helm is not installed"
)
EXAMPLES = Path(__file__).parents[4] / "examples" / "kubernetes"
ROUTES = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/kvctl/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/kvctl/configmaps",
    "Service": "/api/v1/namespaces/kvctl/services",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/kvctl/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/kvctl/rolebindings",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/kvctl/networkpolicies",
    "Deployment": "/apis/apps/v1/namespaces/kvctl/deployments",
    "StatefulSet": "/apis/apps/v1/namespaces/kvctl/statefulsets",
}
TOKENS = {"admin": "token-admin", "operator": "token-operator", "stranger": "token-stranger"}


def free_ports(count: int) -> list[int]:
    with ExitStack() as taken:
        found = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


class ApiServer:
    """A real API server and its etcd, in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        etcd_port, peer_port, port = free_ports(3)
        self.url = f"https://127.0.0.1:{port}"
        self._run("openssl", "genrsa", "-out", "sa.key", "2048")
        self._run("openssl", "rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")
        names = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
        self._run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names,
                  "-keyout", "server.key", "-out", "server.crt")  # fmt: skip
        groups = {"admin": ',"system:masters"'}
        lines = [f"{token},{user},{user}{groups.get(user, '')}" for user, token in TOKENS.items()]
        (directory / "tokens.csv").write_text("\n".join(lines) + "\n")
        client, peer = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
        self._log = (directory / "log").open("w")
        self._processes = [
            self._start("etcd", "--data-dir=etcd", f"--listen-client-urls={client}",
                        f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
                        f"--initial-advertise-peer-urls={peer}",
                        f"--initial-cluster=default={peer}"),
            self._start("kube-apiserver", f"--etcd-servers={client}", "--bind-address=127.0.0.1",
                        f"--secure-port={port}", "--tls-cert-file=server.crt", "--tls-private-key-file=server.key",
                        "--service-account-issuer=https://kubernetes.test", "--service-account-key-file=sa.pub",
                        "--service-account-signing-key-file=sa.key", "--token-auth-file=tokens.csv",
                        "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
                        "--kubelet-preferred-address-types=InternalIP", "--cert-dir=certs",
                        "--service-cluster-ip-range=10.96.0.0/16"),
        ]  # fmt: skip
        self._http = urllib3.PoolManager(ca_certs=str(directory / "server.crt"))
        deadline = time.monotonic() + 120
        while not self._ready():
            assert all(each.poll() is None for each in self._processes), (directory / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the API server is ready"
            time.sleep(0.2)

    def _run(self, *command: str) -> None:
        subprocess.run(command, cwd=self.directory, check=True, capture_output=True, timeout=60)

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=self.directory, stdout=self._log, stderr=subprocess.STDOUT)

    def _ready(self) -> bool:
        try:
            return self.request("GET", "/readyz")[0] == 200
        except urllib3.exceptions.HTTPError:
            return False

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, user: str = "admin", kind: str = "json"
    ) -> tuple[int, str]:
        answer = self._http.request(
            method,
            self.url + path,
            body=None if body is None else json.dumps(body),
            headers={"Authorization": f"Bearer {TOKENS[user]}", "Content-Type": f"application/{kind}"},
            retries=False,
            timeout=60,
        )
        return answer.status, answer.data.decode()

    def create(self, path: str, body: Mapping[str, Any]) -> None:
        status, text = self.request("POST", path, body)
        assert status in (201, 409), text

    def set_status(self, path: str, status: Mapping[str, Any]) -> None:
        code, text = self.request("PATCH", f"{path}/status", {"status": status}, kind="merge-patch+json")
        assert code == 200, text

    def kubeconfig(self, user: str) -> Path:
        cluster = {"server": self.url, "certificate-authority": str(self.directory / "server.crt")}
        path = self.directory / f"kubeconfig-{user}"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "c",
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": {"token": TOKENS[user]}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                }
            )
        )
        return path

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(60)
        self._http.clear()
        self._log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    started = ApiServer(tmp_path_factory.mktemp("api-server"))
    try:
        started.create(ROUTES["Namespace"], {"metadata": {"name": "kvctl"}})
        for document in render({"rbac": {"subjects": [{"kind": "User", "name": "operator"}]}}):
            started.create(ROUTES[document["kind"]], document)
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def kubelet(server: ApiServer) -> Iterator[KubernetesApi]:
    """A node of the API server, whose port-forward leads to this host."""
    node = KubernetesApi((server.directory / "server.crt", server.directory / "server.key"), token="")
    server.create("/api/v1/nodes", {"metadata": {"name": "node-0"}})
    server.set_status(
        "/api/v1/nodes/node-0",
        {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": node.port}},
        },
    )
    yield node
    node.close()


@pytest.fixture
def run_pod(server: ApiServer, kubelet: KubernetesApi) -> Iterator[Callable[..., None]]:
    """Creates a running pod on the node; all are deleted at the end."""
    names: list[str] = []
    pods = "/api/v1/namespaces/kvctl/pods"

    def run(name: str, *ports: int, ip: str = "127.0.0.1", **status: Any) -> None:
        made = pod(name, *ports, ip=ip, **status)
        made["metadata"] = {"name": name, "labels": {"app": "kvctl"}}
        made["spec"]["nodeName"] = "node-0"
        state = made.pop("status")
        for each in state.get("containerStatuses", ()):
            each |= {"image": "kvctl", "imageID": "", "restartCount": 0, "ready": True}
        server.create(pods, made)
        server.set_status(f"{pods}/{name}", state)
        names.append(name)

    yield run
    for name in names:
        server.request("DELETE", f"{pods}/{name}", {"gracePeriodSeconds": 0})


def find(url: str) -> Found:
    source = open_source(url, NO_KEYS)
    try:
        return source.find(time.monotonic_ns() + 60_000_000_000)
    finally:
        source.close()


URL = "kubernetes://kvctl/app=kvctl"
FORWARD = f"{URL}?via=port-forward"


def test_it_accepts_every_manifest(server: ApiServer) -> None:
    chart = {
        "workers": {"matchLabels": {"app": "kvctl"}},
        "networkPolicy": {"enabled": True},
        "toolbox": {"enabled": True, "image": "kvctl"},
    }
    examples = [each for path in sorted(EXAMPLES.glob("*/*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    documents = [each for each in (*examples, *render(chart)) if each["kind"] != "Kustomization"]
    for document in documents:
        status, text = server.request("POST", f"{ROUTES[document['kind']]}?dryRun=All", document)
        assert status in (201, 409), (document["kind"], document["metadata"]["name"], text)
    assert len(documents) > 10


def test_the_role_permits_to_list_and_nothing_else(
    server: ApiServer, run_pod: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_pod("prefill-0", 7311, 7312, ip="10.0.0.5")
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig("operator")))
    found = find(URL)
    assert [endpoint.address for endpoint in found.endpoints] == ["tcp://10.0.0.5:7311", "tcp://10.0.0.5:7312"]
    assert server.request("GET", "/api/v1/namespaces/kvctl/secrets", user="operator")[0] == 403
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig("stranger")))
    with pytest.raises(SourceError, match="kubectl auth can-i list pods -n kvctl") as caught:
        find(URL)
    assert caught.value.code == "not-permitted"


def test_pods_that_do_not_run(server: ApiServer, run_pod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig("operator")))
    run_pod("decode-0", 7311, phase="Pending", containerStatuses=[])
    run_pod("decode-1", 7311)
    found = find(URL)
    assert [endpoint.name for endpoint in found.endpoints] == ["decode-1"]
    (fault,) = found.faults
    assert (fault.agent, fault.message) == ("decode-0", "the pod is pending; kubectl describe pod decode-0 -n kvctl")


def test_port_forward_to_an_agent_with_keys(
    server: ApiServer, run_pod: Any, agents: Any, keys: Path, kvctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig("operator")))
    monkeypatch.setenv("KVCTL_SERVER_KEY", str(keys / "fleet.pub"))
    for name in ("prefill-0", "decode-0"):
        run_pod(name, int(agents(name).remote_address.rpartition(":")[2]), ip="240.0.0.1")
    outcome = kvctl("-e", FORWARD, "--timeout", "30s", "agents", "-o", "json")
    assert (outcome.code, outcome.err) == (0, "")
    assert [row["agent"] for row in json.loads(outcome.out)["data"]] == ["decode-0", "prefill-0"]


def test_port_forward_to_a_port_on_which_nobody_listens(
    server: ApiServer, run_pod: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig("operator")))
    (port,) = free_ports(1)
    run_pod("decode-0", port)
    (fault,) = find(FORWARD).faults
    assert f"port {port}: error forwarding port {port}" in fault.message


def test_who_may_not_port_forward(server: ApiServer, run_pod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = {"metadata": {"name": "reader"}, "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]}
    server.create(ROUTES["Role"], reader)
    server.create(
        ROUTES["RoleBinding"],
        {
            "metadata": {"name": "reader"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "stranger"}],
        },
    )
    try:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig("stranger")))
        run_pod("decode-0", 7311)
        (fault,) = find(FORWARD).faults
        assert fault.code == "not-permitted"
    finally:
        server.request("DELETE", f"{ROUTES['RoleBinding']}/reader")
