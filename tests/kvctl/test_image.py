"""The container image of the Dockerfile: built, measured, and run as its user with the settings of the chart's toolbox.

No registry of images is needed: the base image is made of Debian's packages. It stands for python:3.12-slim.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl_agent.contract import VERSION
from tests.kvctl.client.discovery.conftest import agents, keys
from tests.support.charts import render, which
from tests.support.kubernetes_api import KubernetesApi, pod

__all__ = ["agents", "keys"]

ROOT = Path(__file__).parents[2]
MISSING = [tool for tool in ("buildah", "mmdebstrap", "helm") if which(tool) is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),  # a minute, of downloads for the most part
    pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=f"not root, or not installed: {', '.join(MISSING)}"),
]
BASE_PACKAGES = "base-files,base-passwd,coreutils,dash,libc-bin,libstdc++6,python3,python3-venv"
MAX_BYTES = 250_000_000
UID = 65532


class Image:
    """A working container of the image.

    Attributes:
        config: its configuration, as OCI has it.
        files: its root directory.
    """

    def __init__(self, folder: Path) -> None:
        self._buildah = ["buildah", "--root", str(folder / "store"), "--runroot", str(folder / "run")]
        # The host's certificates and the settings of its pip: a mirror, for example.
        configured = subprocess.run(
            ["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
        )
        found = dict(line.split("=", 1) for line in configured.stdout.splitlines())
        wanted = {name.partition(".")[2].lstrip("."): value.strip("'\"") for name, value in found.items()}
        lines = [f"{name} = {wanted[name]}" for name in ("index-url", "cert", "proxy") if name in wanted]
        (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
        (folder / "base").mkdir()
        suite = next(
            line.partition("=")[2]
            for line in Path("/etc/os-release").read_text().splitlines()
            if line.startswith("VERSION_CODENAME=")
        )
        self._call(
            ["mmdebstrap", "--variant=extract", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
             f"--include={BASE_PACKAGES}", suite, str(folder / "base" / "base.tar")]
        )  # fmt: skip
        (folder / "base" / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        build = ["bud", "--isolation", "chroot", "--pull-never"]
        self.call(*build, "-t", "base", str(folder / "base"))
        self.call(
            *build, "--build-arg", "BASE=localhost/base", "-t", "kvctl", "-v", "/etc/ssl/certs:/etc/ssl/certs:ro",
            "-v", f"{folder / 'pip.conf'}:/etc/pip.conf:ro", str(ROOT),
        )  # fmt: skip
        self._container = self.call("from", "--pull-never", "localhost/kvctl").strip()
        self.config: dict[str, Any] = json.loads(self.call("inspect", self._container))["OCIv1"]["config"]
        self.files = Path(self.call("mount", self._container).strip())

    def call(self, *arguments: str) -> str:
        return self._call([*self._buildah, *arguments])

    def run(self, *command: str, options: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container as the image's user, on the network of this host."""
        start = [*self._buildah, "run", "--isolation", "chroot", *(options or ())]
        return subprocess.run([*start, self._container, "--", *command], capture_output=True, text=True, timeout=120)

    def close(self) -> None:
        self.call("rm", "--all")
        self.call("rmi", "--all", "--force")

    def _call(self, command: list[str]) -> str:
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert outcome.returncode == 0, outcome.stdout[-3000:] + outcome.stderr[-3000:]
        return outcome.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("image")
    try:
        built = Image(folder)
        yield built
        built.close()
    finally:
        subprocess.run(["umount", "-q", folder / "store" / "overlay"], check=False, timeout=60)
        shutil.rmtree(folder)


def test_it_is_small_and_its_user_is_not_root(image: Image) -> None:
    sizes = {path: path.lstat().st_size for path in image.files.rglob("*") if not path.is_symlink() and path.is_file()}
    assert sum(sizes.values()) < MAX_BYTES
    assert sum(size for path, size in sizes.items() if path.is_relative_to(image.files / "opt" / "kvctl")) < 110_000_000
    assert not [path for path in sizes if {"torch", "numpy", "pip", "native"} & set(path.parts)]
    assert image.config["User"] == f"{UID}:{UID}"
    assert image.run("id", "-u").stdout == f"{UID}\n"


def test_its_command_is_kvctl(image: Image) -> None:
    (command,) = image.config["Entrypoint"]
    shown = image.run(command, "--version")
    assert (shown.returncode, shown.stdout) == (0, f"kvctl {VERSION}\n"), shown.stderr
    assert image.run(command, "status").returncode == 3  # there is no agent
    doctor = image.run(command, "doctor")
    assert doctor.returncode == 3
    assert "Traceback" not in doctor.stderr


def test_the_toolbox_of_the_chart_finds_the_agents_of_its_namespace(
    image: Image, tmp_path: Path, agents: Callable[[str], Any], keys: Path
) -> None:
    values = {"toolbox": {"enabled": True, "image": "kvctl"}}
    (deployment,) = (each for each in render(values, namespace="serving") if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    mounted = tmp_path / "mounted"
    mounted.mkdir(mode=0o755)
    shutil.copy(keys / "default.key", mounted / "operator.key")
    shutil.copy(keys / "fleet.pub", mounted)
    api = KubernetesApi()
    try:
        api.kubeconfig(mounted / "kubeconfig")
        for path in mounted.iterdir():
            os.chown(path, UID, UID)
        api.pods = [
            pod(name, int(agents(name).remote_address.rpartition(":")[2])) for name in ("prefill-0", "decode-0")
        ]
        options = ["-v", f"{mounted}:/etc/kvctl:ro", "--env", "KUBECONFIG=/etc/kvctl/kubeconfig"]
        for each in container["env"]:
            options += ["--env", f"{each['name']}={each['value']}"]
        status = image.run("kvctl", "status", "--timeout", "30s", "-o", "json", options=options)
        assert (status.returncode, status.stderr) == (0, "")
        assert "prefill-0" in status.stdout
        assert "decode-0" in status.stdout
        doctor = image.run("kvctl", "doctor", "--timeout", "30s", options=options)
        assert doctor.returncode in (0, 1)
        assert "Traceback" not in doctor.stderr
    finally:
        api.close()
    # The command that waits for `kubectl exec` ends at once when the pod is stopped.
    script = container["command"][-1]
    ended = image.run("sh", "-c", f"sh -c '{script}' & sleep 1; kill $!; wait $!")
    assert ended.returncode < 128 or ended.returncode == 143
