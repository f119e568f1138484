"""The wheels of `make wheels`: contents, metadata, and what a person gets who installs them (`make test-wheels`).

Each Python from 3.11 to 3.14 of this machine gets an empty environment; abi3audit stands for those that are not here.
No compiler is found in these environments. kvctl's dependencies come from the package index, as for everybody; torch,
numpy, msgspec and NIXL are taken from .venv, because they are a gigabyte. The native code for aarch64, and with
Debian unstable's Python, is run by qemu.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

from kvctl_agent.contract import VERSION

DIST, TOOLS = Path(os.environ["DIST"]), Path(os.environ["WHEEL_TOOLS"])
COMMAND_LINE = DIST / f"kvctl-{VERSION}-py3-none-any.whl"
AGENTS = [DIST / f"kvctl_agent-{VERSION}-cp311-abi3-manylinux_2_28_{arch}.whl" for arch in ("x86_64", "aarch64")]
ROOT = Path(__file__).parents[2]
NATIVE = {
    f"kvctl_agent/native/{name}{suffix}"
    for name in ("row_copies", "nixl_requests", "turns")
    for suffix in (".abi3.so", ".pyi")
}
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
DATA = {f"{package.replace('.', '/')}/{name}" for package in DECLARED for name in DECLARED[package]}
SHARED = re.compile(r"kvctl_agent/(__init__\.py|errors\.py|py\.typed|(contract|host)/\w+\.py)")


def found(minor: int) -> Path | None:
    """Returns a Python 3.`minor` of this machine."""
    if minor == sys.version_info.minor:
        return Path(sys.executable)
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [*versions.glob(f"3.{minor}.*/bin/python3"), *map(Path, filter(None, [shutil.which(f"python3.{minor}")]))]
    runs = (
        place for place in places if subprocess.run([place, "-m", "venv", "-h"], capture_output=True).returncode == 0
    )
    return next(runs, None)


PYTHONS = [python for minor in range(11, 15) if (python := found(minor)) is not None]


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert any(re.search(r"\.dist-info/licenses/LICENSE$", each) for each in archive.namelist())
        return HeaderParser().parsestr(archive.read(name).decode())


def modules(*folders: str) -> set[str]:
    """Returns the modules of folders of the checkout, as paths from its root."""
    return {path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")}


class TestContents:
    def test_the_command_line_has_what_it_imports_and_nothing_native(self) -> None:
        files = names(COMMAND_LINE)
        agents = {name for name in modules("kvctl_agent") if SHARED.fullmatch(name)} | {"kvctl_agent/py.typed"}
        assert files == modules("kvctl") | agents | {name for name in DATA if name.startswith("kvctl/")}

    @pytest.mark.parametrize("wheel", AGENTS, ids=["x86_64", "aarch64"])
    def test_the_agent_has_the_rest_with_native_code_and_no_lab(self, wheel: Path) -> None:
        files = names(wheel)
        assert files == {name for name in modules("kvctl_agent") if not SHARED.fullmatch(name)} | NATIVE
        assert not files & names(COMMAND_LINE)

    def test_both_are_of_one_version_and_need_each_other(self) -> None:
        of_agent, of_command = metadata(AGENTS[0]), metadata(COMMAND_LINE)
        assert of_agent["Version"] == of_command["Version"] == VERSION
        assert of_agent["License-Expression"] == of_command["License-Expression"] == "Apache-2.0"
        needed = of_agent.get_all("Requires-Dist")
        assert f"kvctl=={VERSION}" in needed
        assert {re.split(r"\W", line)[0] for line in needed} == {"kvctl", "torch", "numpy", "msgspec"}
        extras = [line for line in of_command.get_all("Requires-Dist") if "extra ==" in line]
        assert f'kvctl-agent=={VERSION}; extra == "agent"' in extras
        assert 'nixl>=1.5; extra == "nixl"' in extras
        offered = set(of_command.get_all("Provides-Extra"))
        assert {"sglang", "vllm", "gpu", "mooncake", "kubernetes"} <= offered
        assert not {"docs", "dev", "all-cpu"} & offered

    @pytest.mark.parametrize("wheel", [COMMAND_LINE, AGENTS[0]], ids=["kvctl", "kvctl-agent"])
    def test_the_description_needs_no_file_of_the_checkout(self, wheel: Path) -> None:
        text = metadata(wheel).get_payload()
        assert text.startswith("# kvctl\n")
        assert re.findall(r"\]\((?!https:)", text) == []


def test_the_tools_find_nothing_wrong() -> None:
    """Symbols of glibc and libstdc++ that 2.28 lacks, of Python outside the stable ABI, and metadata."""
    run(TOOLS / "abi3audit", "--strict", *AGENTS)
    run(TOOLS / "twine", "check", "--strict", COMMAND_LINE, *AGENTS)
    for wheel in AGENTS:
        text = " ".join(run(TOOLS / "auditwheel", "show", wheel).split())
        assert f'is consistent with the following platform tag: "{wheel.stem.rpartition("-")[2]}"' in text


def run(*command: str | Path, code: int = 0, cwd: Path = ROOT, **environment: str) -> str:
    """Runs a command; returns its output and errors."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, env={**os.environ, **environment}, cwd=cwd, check=False
    )
    assert done.returncode == code, f"{command} exited with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


class Environment:
    """A virtual environment in which no compiler is found, nor what the checkout has."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.bin = folder / "bin"
        run(python, "-m", "venv", folder)
        self._clean = {
            "PATH": str(self.bin),
            "PYTHONPATH": "",
            "HOME": str(folder),
            "KVCTL_SOCKET_DIR": str(folder / "s"),
        }

    def pip(self, *arguments: str | Path) -> None:
        run(
            self.bin / "python",
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            *arguments,
            PATH=str(self.bin),
        )

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        return run(self.bin / program, *arguments, code=code, cwd=self.bin.parent, **self._clean)


@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: run(python, "-V").strip())
def test_the_command_line_and_the_native_code_run_on_each_python(python: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    environment = Environment(python, tmp_path / "venv")
    environment.pip(COMMAND_LINE)
    assert environment.run("kvctl", "--version") == f"kvctl {VERSION}\n"
    assert "this host" in environment.run("kvctl", "doctor", code=3)  # 3: no agent
    assert "needs the agent: `pip install 'kvctl[nixl]'`" in environment.run("kvctl", "status", code=3)
    print(f"{time.monotonic() - started:.1f} s from nothing to kvctl doctor")
    for command in ("bench", "demo"):
        assert "pip install 'kvctl[nixl]'" in environment.run("kvctl", command, code=1)
    environment.pip("--no-index", "--find-links", DIST, "--no-deps", "kvctl-agent")
    joined = environment.run("python", "-c", DESCRIPTORS)
    assert joined == "[[24, 72], [108, 100], [16, 8]]\n"


DESCRIPTORS = """
from array import array
from kvctl_agent.native import nixl_requests, row_copies

pages, there = array("q", [4, 3, 9]), array("q", [2, 1, 0])
steps = 8, 1, 8
words = row_copies.page_descriptors(pages, there, steps, steps, 8, array("q", [0]), array("q", [100]))
print([array("Q", each).tolist() for each in words])
"""


@pytest.mark.parametrize(
    ("wheel", "debian", "machine", "least"),
    [(AGENTS[1], "arm64", "aarch64", (3, 11)), (AGENTS[0], "amd64", "x86_64", (3, 14))],
    ids=["aarch64", "the newest Python"],
)
def test_the_native_code_runs_under_qemu(
    wheel: Path, debian: str, machine: str, least: tuple[int, int], tmp_path: Path
) -> None:
    """With Debian's Python for a processor: of this machine's release, or of unstable."""
    root, site = tmp_path / "root", tmp_path / "site"
    if not (shutil.which("mmdebstrap") and shutil.which(f"qemu-{machine}-static")):
        pytest.skip("needs mmdebstrap and qemu-user-static of Debian")
    packages = "python3-minimal,libpython3-stdlib,libstdc++6"
    release = "sid" if least > (3, 11) else platform.freedesktop_os_release()["VERSION_CODENAME"]
    late = '--aptopt=Acquire::Check-Valid-Until "false"'  # mirrors of unstable may be weeks behind
    run("mmdebstrap", "--variant=extract", late, f"--arch={debian}", f"--include={packages}", release, root)
    for each in (COMMAND_LINE, wheel):
        with zipfile.ZipFile(each) as archive:
            archive.extractall(site)
    libraries = [root / f"{folder}/{machine}-linux-gnu" for folder in ("usr/lib", "lib")]
    (loader,) = (each for folder in libraries for each in folder.glob("ld-linux-*"))
    paths = ":".join(map(str, libraries))
    python = f"qemu-{machine}-static", loader, "--library-path", paths, root / "usr/bin/python3"
    code = f"import platform, sys; assert sys.version_info >= {least}; print(platform.machine()){DESCRIPTORS}"
    output = run(*python, "-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert output == f"{machine}\n[[24, 72], [108, 100], [16, 8]]\n"


def test_the_agents_wheel_moves_bytes_over_nixl(tmp_path: Path) -> None:
    environment = Environment(Path(sys.executable), tmp_path / "venv")
    environment.pip(COMMAND_LINE)
    environment.pip("--no-index", "--find-links", DIST, "--no-deps", "kvctl-agent")
    # A path in a .pth file: packages of .venv, but not its editable kvctl, after those of the environment.
    site = Path(environment.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "heavy.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = (
        "import kvctl.cli, kvctl_agent.agent, kvctl_agent.native.row_copies as n; print(n.__file__, kvctl.cli.__file__)"
    )
    assert environment.run("python", "-c", code).count(str(site)) == 2
    small = "--prefill-tp", "2", "--layers", "4", "--tokens", "256", "--rooms", "2"
    table = environment.run("kvctl", "bench", "--transport", "nixl", *small)
    assert "every byte verified" in table
