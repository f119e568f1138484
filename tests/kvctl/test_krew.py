"""The plugin as krew installs it: packed, unpacked, found by a real kubectl, and run without the checkout.

No package of a registry has krew: the rules for its manifests are repeated here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvctl_agent.contract import VERSION
from tests.kvctl.client.discovery.conftest import agents, keys
from tests.support.charts import TOOLS_PATH, which
from tests.support.kubernetes_api import KubernetesApi, pod

__all__ = ["agents", "keys"]

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),  # half a minute, of downloads for the most part
    pytest.mark.skipif(which("kubectl") is None, reason="kubectl is not installed"),
]
ROOT = Path(__file__).parents[2]
URI = "https://registry.example/kubectl-kvctl.tar.gz"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500, check=True
    )


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("krew")
    tools = folder / "tools" / "bin" / "python"
    run(sys.executable, "-m", "venv", tools.parents[1])
    constraints = ROOT / "release" / "requirements.txt"
    run(tools, "-m", "pip", "install", "-q", "-c", constraints, "setuptools", "tomli-w", "wheel")
    run(tools, ROOT / "release" / "wheels.py", "--command-line", "--out", folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, ROOT / "release" / "krew.py", "--wheel", wheel, "--uri", URI, "--out", folder)
    return folder


def test_the_manifest_is_one_of_krew(packed: Path) -> None:
    manifest = yaml.safe_load((packed / "kvctl.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("krew.googlecontainertools.github.com/v1alpha2", "Plugin")
    assert manifest["metadata"] == {"name": "kvctl"}  # the name of the file, and of the command
    spec = manifest["spec"]
    assert spec["version"] == f"v{VERSION}"
    assert re.fullmatch(r"v\d+\.\d+\.\d+", spec["version"])
    assert 0 < len(spec["shortDescription"]) <= 50
    (platform,) = spec["platforms"]
    assert platform["selector"]["matchLabels"]["os"] == "linux"
    assert platform["uri"] == URI
    assert platform["sha256"] == hashlib.sha256((packed / "kubectl-kvctl.tar.gz").read_bytes()).hexdigest()
    with tarfile.open(packed / "kubectl-kvctl.tar.gz") as archive:
        assert archive.getmember(platform["bin"]).mode & 0o111
        names = archive.getnames()
    assert "LICENSE" in names
    assert "lib/kubernetes/client/__init__.py" in names
    assert not [name for name in names if name.startswith("lib/kubernetes/aio")]


def test_the_page_installs_what_was_packed(packed: Path) -> None:
    (options,) = re.findall(r"^kubectl krew install (.+)$", (ROOT / "docs" / "kubernetes.md").read_text(), re.MULTILINE)
    for option in options.split():
        assert (packed / option.partition("=dist/")[2]).is_file()


def test_kubectl_runs_what_the_archive_has(packed: Path, tmp_path: Path, agents: Any, keys: Path) -> None:
    store = tmp_path / "store" / "kvctl" / VERSION
    with tarfile.open(packed / "kubectl-kvctl.tar.gz") as archive:
        archive.extractall(store, filter="data")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl-kvctl").symlink_to(store / "kubectl-kvctl")
    api = KubernetesApi()
    try:
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{TOOLS_PATH}",
            "KUBECONFIG": str(api.kubeconfig(tmp_path / "kubeconfig", namespace="serving")),
            "KVCTL_SERVER_KEY": str(keys / "fleet.pub"),
            "KVCTL_TIMEOUT": "30s",
            "PYTHONPATH": "",
        }
        assert run("kubectl", "kvctl", "--version", **environment).stdout == f"kvctl {VERSION}\n"
        api.pods = [pod("decode-0", int(agents("decode-0").remote_address.rpartition(":")[2]))]
        outcome = run("kubectl", "kvctl", "agents", "-o", "json", **environment)
        assert [row["agent"] for row in json.loads(outcome.stdout)["data"]] == ["decode-0"]
    finally:
        api.close()
    without = subprocess.run(["/bin/sh", store / "kubectl-kvctl"], env={"PATH": str(tmp_path)}, capture_output=True)
    assert without.returncode == 1
    assert b"is not in PATH: install it" in without.stderr
