"""`kubectl kvctl`: a real kubectl runs the plugin, which finds the agents of a namespace."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.discovery import kubernetes_source
from kvctl.exit_codes import ExitCode
from kvctl.kubectl import kvctl_arguments, main
from kvctl_agent.contract import VERSION
from tests.kvctl.client.discovery.conftest import agents, keys
from tests.support.charts import TOOLS_PATH, which
from tests.support.kubectl import install_plugin
from tests.support.kubernetes_api import KubernetesApi, pod

__all__ = ["agents", "keys"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kubernetes.md"
VIA = "via=port-forward"
installed = pytest.mark.skipif(which("kubectl") is None, reason="kubectl is not installed")
Kubectl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    served = KubernetesApi()
    monkeypatch.setenv("KUBECONFIG", str(served.kubeconfig(tmp_path / "kubeconfig", namespace="serving")))
    yield served
    served.close()


@pytest.fixture
def kubectl(api: KubernetesApi, tmp_path: Path, keys: Path) -> Kubectl:
    install_plugin(tmp_path / "bin")
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{TOOLS_PATH}",
        "KVCTL_SERVER_KEY": str(keys / "fleet.pub"),
        "KVCTL_TIMEOUT": "30s",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["kubectl", *arguments], env=env, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["status"], ["-e", f"kubernetes://serving/?{VIA}", "status"]),
        (["-n", "a", "rooms", "-w", "-o", "json"], ["-e", f"kubernetes://a/?{VIA}", "rooms", "-w", "-o", "json"]),
        (
            ["rooms", "slow", "--limit", "3", "-n", "a"],
            ["-e", f"kubernetes://a/?{VIA}", "rooms", "slow", "--limit", "3"],
        ),
        (["status", "--namespace=a"], ["-e", f"kubernetes://a/?{VIA}", "status"]),
        (
            ["status", "--selector", "app=a,x in (b)"],
            ["-e", f"kubernetes://serving/app%3Da%2Cx%20in%20%28b%29?{VIA}", "status"],
        ),
        (["rooms", "--sort-by", "-name"], ["-e", f"kubernetes://serving/?{VIA}", "rooms", "--sort-by", "-name"]),
        (["rooms", "show", "--", "-n", "a"], ["-e", f"kubernetes://serving/?{VIA}", "rooms", "show", "--", "-n", "a"]),
        (["status", "--context", "c/d&e"], ["-e", f"kubernetes://default/?context=c%2Fd%26e&{VIA}", "status"]),
    ],
)
def test_options_of_kubectl_become_the_endpoint(api: KubernetesApi, arguments: list[str], expected: list[str]) -> None:
    assert kvctl_arguments(arguments) == expected


def test_the_namespace_is_that_of_the_chosen_context(tmp_path: Path, api: KubernetesApi, monkeypatch: Any) -> None:
    other = api.kubeconfig(tmp_path / "other", context="prod", namespace="production")
    monkeypatch.setenv("KUBECONFIG", f"{other}:{os.environ['KUBECONFIG']}")
    assert kvctl_arguments(["status", "--context", "prod"])[1].startswith("kubernetes://production/")
    assert kvctl_arguments(["status", "--context", "test"])[1].startswith("kubernetes://serving/")
    assert kvctl_arguments(["status"])[1].startswith("kubernetes://production/")  # of the first file, as in kubectl
    other.write_text("- no\n- configuration\n")
    assert kvctl_arguments(["status"])[1].startswith("kubernetes://default/")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert kvctl_arguments(["status"])[1].startswith("kubernetes://default/")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "-n", "a/app=b"], "a namespace cannot be named 'a/app=b'; kubectl get namespaces"),
        (["status", "--namespace=-w"], "a namespace cannot be named '-w'"),
        (["status", "-n"], "option -n has no value"),
    ],
)
def test_what_is_no_namespace_is_wrong_usage(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl-kvctl", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.USAGE
    assert words in capsys.readouterr().err


def test_in_a_pod_the_namespace_is_that_of_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "namespace").write_text("serving\n")
    monkeypatch.setattr(kubernetes_source, "POD_NAMESPACE", tmp_path / "namespace")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert kvctl_arguments(["status"])[1].startswith("kubernetes://default/")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert kvctl_arguments(["status"])[1].startswith("kubernetes://serving/")
    assert kvctl_arguments(["status", "--context", "prod"])[1].startswith("kubernetes://default/")


def test_the_packed_plugin_imports_nothing_from_the_current_directory(tmp_path: Path, api: KubernetesApi) -> None:
    launcher = tmp_path / "kubectl-kvctl"
    launcher.write_text(runpy.run_path(str(ROOT / "release" / "krew.py"))["LAUNCHER"])
    (tmp_path / "lib").symlink_to(ROOT)
    (tmp_path / "click.py").write_text("raise SystemExit('click.py of the current directory')")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", launcher, "--version"],
        env={**os.environ, "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvctl {VERSION}\n", "")


@installed
def test_kubectl_lists_and_runs_it(api: KubernetesApi, kubectl: Kubectl, agents: Any) -> None:
    assert "kubectl-kvctl" in kubectl("plugin", "list").stdout
    api.pods = [pod(name, int(agents(name).remote_address.rpartition(":")[2])) for name in ("prefill-0", "decode-0")]
    api.pods.append(pod("router"))
    outcome = kubectl("kvctl", "agents", "-n", "serving", "-o", "json")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert [row["agent"] for row in json.loads(outcome.stdout)["data"]] == ["decode-0", "prefill-0"]


def test_pods_are_chosen_by_label_and_namespace(
    api: KubernetesApi, kvctl: Any, agents: Any, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCTL_SERVER_KEY", str(keys / "fleet.pub"))
    monkeypatch.setenv("KVCTL_TIMEOUT", "30s")
    api.pods = [pod("other", 1), pod("decode-0", int(agents("decode-0").remote_address.rpartition(":")[2]))]
    api.pods[1]["metadata"]["labels"] = {"app": "engine"}
    chosen = kvctl(*kvctl_arguments(["agents", "--selector", "app=engine", "-o", "json"]))
    assert [row["agent"] for row in chosen.data] == ["decode-0"]
    nowhere = kvctl(*kvctl_arguments(["status", "-n", "elsewhere"]))
    assert nowhere.code == 3
    assert "kubectl get pods -n elsewhere --show-labels" in nowhere.err


def test_the_commands_of_the_page_are_accepted(
    api: KubernetesApi, kvctl: Any, agents: Any, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = api.kubeconfig(tmp_path / "prod", context="prod", namespace="serving")
    monkeypatch.setenv("KUBECONFIG", f"{other}:{os.environ['KUBECONFIG']}")
    monkeypatch.setenv("KVCTL_TIMEOUT", "30s")
    monkeypatch.setenv("KVCTL_SERVER_KEY", str(keys / "fleet.pub"))
    commands = re.findall(r"^kubectl kvctl (.+?)(?: +#.*)?$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) > 3
    api.pods = [pod("decode-0", int(agents("decode-0").remote_address.rpartition(":")[2]))]
    for command in commands:
        text = re.sub(r"\S*fleet\.pub", str(keys / "fleet.pub"), command)
        text = re.sub(r"-n \S+", "-n serving", text).replace("app=sglang", "app=kvctl")
        outcome = kvctl(*kvctl_arguments(shlex.split(text)))
        assert outcome.code == 0 or (outcome.code == 1 and "doctor" in command), outcome.err


def test_help_and_version_need_no_cluster(kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert kvctl(*kvctl_arguments(["--version"])).out.startswith("kvctl ")
    assert "Usage: kvctl" in kvctl(*kvctl_arguments([])).out
