"""`kubernetes://`: agents with keys in the pods of a recorded Kubernetes API, reached directly and by port-forward."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.discovery import open_source
from kvctl.client.discovery.source import Found, SourceError
from kvctl.client.keys import NO_KEYS
from kvctl.errors import CliError
from tests.support.admin_server import AdminServer
from tests.support.kubernetes_api import KubernetesApi, pod
from tests.support.polling import until

URL = "kubernetes://serving/app=kvctl"
FORWARD = f"{URL}?via=port-forward"
UNREACHABLE_IP = "240.0.0.1"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    served = KubernetesApi()
    monkeypatch.setenv("KUBECONFIG", str(served.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.setenv("KVCTL_TIMEOUT", "30s")
    yield served
    served.close()


def find(url: str = URL, timeout_s: float = 30) -> Found:
    source = open_source(url, NO_KEYS)
    try:
        return source.find(time.monotonic_ns() + int(timeout_s * 1e9))
    finally:
        source.close()


def addresses(found: Found) -> dict[str, str]:
    return {endpoint.name: endpoint.address for endpoint in found.endpoints}


# ---- which pods have agents ----------------------------------------------------------------------------------------


def test_running_pods_of_the_labels_are_found(api: KubernetesApi) -> None:
    other = pod("other", 7311)
    other["metadata"]["labels"] = {"app": "router"}
    elsewhere = pod("elsewhere", 7311)
    elsewhere["metadata"]["namespace"] = "test"
    api.pods = [pod("prefill-0", 7311, ip="10.0.0.5"), pod("decode-0", 7311, ip="fd00::6"), other, elsewhere]
    found = find()
    assert addresses(found) == {"prefill-0": "tcp://10.0.0.5:7311", "decode-0": "tcp://[fd00::6]:7311"}
    assert found.faults == ()


@pytest.mark.parametrize("url", ["kubernetes://serving", "kubernetes://serving/?via=port-forward"])
def test_without_labels_all_pods_with_an_admin_port_are_found(
    api: KubernetesApi, agents: Any, url: str, keys: Path
) -> None:
    api.pods = [pod("decode-0", int(agents("decode-0").remote_address.rpartition(":")[2])), pod("router")]
    api.pods[0]["metadata"]["labels"] = {}
    assert (list(addresses(find(url))), find(url).faults) == (["decode-0"], ())
    del api.pods[0]
    assert error(url) == (
        "unreachable",
        "no pod has a container port named kvctl-admin; kubectl get pods -n serving --show-labels lists those that "
        "there are",
    )


def test_a_pod_with_several_ranks_has_several_ports(api: KubernetesApi) -> None:
    api.pods = [pod("prefill-0", 7311, 7312, ip="10.0.0.5")]
    assert addresses(find()) == {"prefill-0:7311": "tcp://10.0.0.5:7311", "prefill-0:7312": "tcp://10.0.0.5:7312"}


def test_ports_by_another_name_and_by_number(api: KubernetesApi) -> None:
    renamed = pod("a", 7311, ip="10.0.0.5")
    renamed["spec"]["containers"][0]["ports"][0]["name"] = "admin"
    renamed["spec"]["containers"][0]["ports"].append({"name": "http", "containerPort": 8000})
    api.pods = [renamed]
    assert addresses(find(f"{URL}?port=admin")) == {"a": "tcp://10.0.0.5:7311"}
    assert addresses(find(f"{URL}?port=7311")) == {"a": "tcp://10.0.0.5:7311"}
    assert addresses(find(f"{URL}?port=9999")) == {"a": "tcp://10.0.0.5:9999"}
    (fault,) = find().faults
    assert (fault.agent, fault.message.partition(";")[0]) == ("a", "the pod has no container port named kvctl-admin")


def test_many_pods_come_in_pages(api: KubernetesApi) -> None:
    api.pods = [pod(f"decode-{number}", 7311, ip=f"10.0.0.{number}") for number in range(25)]
    api.page = 10
    assert len(find().endpoints) == 25
    assert api.lists == 3


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"phase": "Pending"}, "the pod is pending;"),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: no nvidia.com/gpu"}
                ],
            },
            "the pod is pending: 0/3 nodes are available: no nvidia.com/gpu;",
        ),
        (
            {
                "phase": "Pending",
                "containerStatuses": [
                    {"name": "worker", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
                ],
            },
            "the pod is pending: ErrImagePull: not found;",
        ),
        (
            {"phase": "Failed", "message": "The node was low on memory"},
            "the pod is failed: The node was low on memory;",
        ),
        ({"phase": "Unknown"}, "the pod is unknown;"),
        (
            {"containerStatuses": [{"name": "worker", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]},
            "container worker does not run: CrashLoopBackOff;",
        ),
        (
            {"containerStatuses": [{"name": "worker", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}]},
            "container worker does not run: Error;",
        ),
    ],
)
def test_a_pod_that_does_not_run_is_told(api: KubernetesApi, status: dict[str, Any], text: str) -> None:
    api.pods = [pod("decode-0", 7311, **status), pod("decode-1", 7311)]
    found = find()
    assert list(addresses(found)) == ["decode-1"]
    (fault,) = found.faults
    assert (fault.agent, fault.code) == ("decode-0", "unreachable")
    assert fault.message == f"{text} kubectl describe pod decode-0 -n serving"


def test_a_terminating_pod_is_named_as_such_until_its_container_ends(api: KubernetesApi) -> None:
    ending = pod("decode-0", 7311)
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    api.pods = [ending]
    assert list(addresses(find())) == ["decode-0 (terminating)"]
    ending["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
    assert find() == Found()


# ---- the API and who may use it ------------------------------------------------------------------------------------


def error(url: str = URL, timeout_s: float = 30) -> tuple[str, str]:
    with pytest.raises(SourceError) as caught:
        find(url, timeout_s)
    return caught.value.code, str(caught.value)


def test_who_may_not_list_pods_is_told_how_to_check_it(api: KubernetesApi) -> None:
    api.denied = {"list"}
    assert error() == ("not-permitted", "you may not list the pods: kubectl auth can-i list pods -n serving")


def test_credentials_that_were_replaced_are_read_again(api: KubernetesApi, tmp_path: Path) -> None:
    api.pods = [pod("decode-0", 7311)]
    source = open_source(URL, NO_KEYS)
    try:
        for each in ("first", "second"):
            api.token = each
            with pytest.raises(SourceError, match="does not accept these credentials"):
                source.find(time.monotonic_ns() + 30_000_000_000)
            api.kubeconfig(tmp_path / "kubeconfig", token=each)
            assert source.find(time.monotonic_ns() + 30_000_000_000).endpoints
    finally:
        source.close()


def test_an_api_server_that_does_not_answer_in_time(api: KubernetesApi) -> None:
    api.delay_s = 60
    began = time.monotonic()
    code, text = error(timeout_s=2)
    assert (code, "does not answer" in text) == ("timeout", True)
    assert time.monotonic() - began < 30


def test_a_list_that_never_ends_ends_with_the_time_limit(api: KubernetesApi) -> None:
    api.pods, api.page, api.delay_s = [pod("decode-0", 7311)], 0, 0.01
    failed: list[tuple[str, str]] = []
    asking = threading.Thread(target=lambda: failed.append(error(timeout_s=3)), daemon=True)
    asking.start()
    asking.join(30)
    api.page = 500  # ends it in any case
    ((code, text),) = failed
    assert (code, "has not listed all pods in time" in text) == ("timeout", True)
    assert api.lists > 1


def test_another_context_is_chosen(api: KubernetesApi, tmp_path: Path) -> None:
    api.pods = [pod("decode-0", 7311)]
    api.kubeconfig(tmp_path / "kubeconfig", context="arn:aws:eks:eu-1:1:cluster/prod")
    assert find(f"{URL}?context=arn:aws:eks:eu-1:1:cluster/prod").endpoints
    code, text = error(f"{URL}?context=test")
    assert code == "unreachable"
    assert "kubectl config get-contexts" in text


def test_the_current_context_is_that_of_the_first_file(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in kubectl; the package takes that of the last."""
    api.pods = [pod("decode-0", 7311)]
    first = tmp_path / "kubeconfig"
    second = api.kubeconfig(tmp_path / "second", context="other", token="not-accepted")
    second.write_text(second.read_text().replace("name: u", "name: v").replace("user: u", "user: v"))
    monkeypatch.setenv("KUBECONFIG", f"{first}:{second}")
    assert find().endpoints
    monkeypatch.setenv("KUBECONFIG", f"{second}:{first}")
    assert "does not accept these credentials" in error()[1]


@pytest.mark.parametrize(
    "text", ["- 1\n", "contexts: [1]\ncurrent-context: a\n", "{", "contexts: 1\ncurrent-context: a\n"]
)
def test_a_file_that_is_no_kubeconfig(api: KubernetesApi, tmp_path: Path, text: str) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    assert "no usable kubeconfig" in error()[1]


@pytest.mark.parametrize("body", ["x", "[]", '{"items": [{}]}', '{"items": [], "metadata": []}', '{"metadata": {}}'])
def test_an_answer_of_something_else(api: KubernetesApi, tmp_path: Path, body: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        api.url = f"http://127.0.0.1:{server.getsockname()[1]}"
        api.kubeconfig(tmp_path / "kubeconfig")
        thread = threading.Thread(target=_answer_once, args=(server, body))
        thread.start()
        assert error() == ("protocol", "the answer is not a list of pods")
        thread.join()


def _answer_once(server: socket.socket, body: str) -> None:
    client, _ = server.accept()
    with client:
        client.recv(1 << 16)
        client.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("kubernetes:///app=kvctl", r"write kubernetes://NAMESPACE\[/LABEL=VALUE"),
        ("kubernetes://Not_A_Name/app=kvctl", r"write kubernetes://NAMESPACE\[/LABEL=VALUE"),
        (f"{URL}?via=magic", "via must be port-forward"),
        (f"{URL}?port=99999", "99999 is not a port"),
        (f"{URL}?prot=1", "prot is none of port, context, via"),
    ],
)
def test_a_malformed_url(url: str, text: str) -> None:
    with pytest.raises(CliError, match=text):
        open_source(url, NO_KEYS)


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(CliError, match=r"pip install '\.\[kubernetes\]'"):
        open_source(URL, NO_KEYS)


# ---- port-forward --------------------------------------------------------------------------------------------------


def port_of(server: AdminServer) -> int:
    return int(server.remote_address.rpartition(":")[2])


def names(outcome: Any) -> list[str]:
    return [row["agent"] for row in outcome.data]


def test_agents_of_pods_are_asked_on_the_pod_network(
    api: KubernetesApi, agents: Any, keys: Path, kvctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCTL_SERVER_KEY", str(keys / "fleet.pub"))
    api.pods = [pod(name, port_of(agents(name))) for name in ("prefill-0", "decode-0")]
    outcome = kvctl("-e", URL, "agents", "-o", "json")
    assert (outcome.code, outcome.err, names(outcome)) == (0, "", ["decode-0", "prefill-0"])


def test_agents_of_pods_are_asked_through_the_api(
    api: KubernetesApi, agents: Any, keys: Path, kvctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCTL_SERVER_KEY", str(keys / "fleet.pub"))
    api.pods = [pod(name, port_of(agents(name)), ip=UNREACHABLE_IP) for name in ("prefill-0", "decode-0")]
    threads = threading.active_count()
    outcome = kvctl("-e", FORWARD, "agents", "-o", "json")
    assert (outcome.code, outcome.err, names(outcome)) == (0, "", ["decode-0", "prefill-0"])
    until(lambda: not api.forwards, "the port-forwards are closed")
    until(lambda: threading.active_count() <= threads, "no thread of a port-forward is left")


def test_relays_at_other_ports_are_the_same_agents(
    api: KubernetesApi, agents: Any, keys: Path, kvctl: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each run has other local ports, and no port is asked again when the API fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KVCTL_SERVER_KEY", str(keys / "fleet.pub"))
    api.pods = [pod(name, port_of(agents(name)), ip=UNREACHABLE_IP) for name in ("prefill-0", "decode-0")]
    for _ in range(2):
        rows = kvctl("-e", FORWARD, "agents", "-o", "json").data
        assert {row["agent"]: row["state"] for row in rows} == {"decode-0": "ok", "prefill-0": "ok"}
    api.denied = {"list"}
    outcome = kvctl("-e", FORWARD, "agents", "-o", "json")
    assert "kubectl auth can-i list pods" in outcome.err
    assert "asking the" not in outcome.err


def test_a_context_of_pods(
    api: KubernetesApi, agents: Any, keys: Path, kvctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.pods = [pod("decode-0", port_of(agents("decode-0")))]
    outcome = kvctl("context", "add", "prod", "-e", URL, "--server-key", str(keys / "fleet.pub"))
    assert outcome.code == 0, outcome.err
    assert names(kvctl("-c", "prod", "agents", "-o", "json")) == ["decode-0"]


def test_port_forwards_are_kept_and_follow_the_pods(api: KubernetesApi, agents: Any) -> None:
    servers = {name: agents(name) for name in ("prefill-0", "decode-0")}
    api.pods = [pod(name, port_of(server), ip=UNREACHABLE_IP) for name, server in servers.items()]
    source = open_source(FORWARD, NO_KEYS)
    try:
        first = addresses(source.find(time.monotonic_ns() + 30_000_000_000))
        assert sorted(first) == ["decode-0", "prefill-0"]
        assert addresses(source.find(time.monotonic_ns() + 30_000_000_000)) == first
        api.pods = api.pods[:1]
        assert addresses(source.find(time.monotonic_ns() + 30_000_000_000)) == {"prefill-0": first["prefill-0"]}
        until(lambda: api.forwards == 1, "the port-forward of the pod that has gone is closed")
    finally:
        source.close()
    until(lambda: not api.forwards, "all port-forwards are closed")


def test_a_client_connects_again_after_the_api_server_has_dropped_the_connection(
    api: KubernetesApi, agents: Any
) -> None:
    server = agents("decode-0")
    api.pods = [pod("decode-0", port_of(server), ip=UNREACHABLE_IP)]
    source = open_source(FORWARD, NO_KEYS)
    try:
        (endpoint,) = source.find(time.monotonic_ns() + 30_000_000_000).endpoints
        for _ in range(3):
            with socket.create_connection(
                ("127.0.0.1", int(endpoint.address.rpartition(":")[2])), timeout=60
            ) as client:
                assert client.recv(1) == b"\xff"  # ZMTP's greeting
                api.drop_forwards()
                while client.recv(1 << 16):
                    pass
    finally:
        source.close()


def test_a_port_on_which_nobody_listens(api: KubernetesApi, agents: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    api.pods = [pod("decode-0", free, ip=UNREACHABLE_IP), pod("decode-1", port_of(agents("decode-1")))]
    found = find(FORWARD)
    assert list(addresses(found)) == ["decode-1"]
    (fault,) = found.faults
    assert fault.agent == "decode-0"
    assert f"port {free}: error forwarding port {free}" in fault.message


def test_a_port_that_is_silent_is_no_admin_endpoint(api: KubernetesApi) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api.pods = [pod("decode-0", silent.getsockname()[1], ip=UNREACHABLE_IP)]
        (fault,) = find(FORWARD, timeout_s=3).faults
    assert (fault.code, "is silent" in fault.message) == ("timeout", True)


def test_who_may_not_port_forward_is_told_how_to_check_it(api: KubernetesApi) -> None:
    api.denied = {"portforward"}
    api.pods = [pod("decode-0", 7311, ip=UNREACHABLE_IP)]
    (fault,) = find(FORWARD).faults
    assert fault.code == "not-permitted"
    assert "kubectl auth can-i get pods/portforward -n serving" in fault.message
