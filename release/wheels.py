"""Builds the wheels of kvctl's two distributions into a directory: `python release/wheels.py --help`.

`kvctl`, the command line, is pure Python and contains of `kvctl_agent` what the command line imports. `kvctl-agent` has
the rest of `kvctl_agent` with its native code, for each processor. `pyproject.toml` says what both contain and need; a
wheel is built from a copy of its files, so that nothing else of the checkout gets into it.

The native code is compiled by Debian's gcc, which has NIXL's C++ library, and linked by zig, which has the symbols of
every glibc: the wheels run with glibc 2.28 and newer wherever they are built.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).parents[1]
GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")
SHARED = ("__init__.py", "errors.py", "py.typed", "contract", "host")
"""What the command line imports of `kvctl_agent`, and `kvctl` therefore contains."""
DATA = {".py", ".pyi", ".toml", ".typed"}
EXTENSION = ".abi3.so"


def main() -> None:
    """Builds the wheels that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the wheels (default: dist)")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="of kvctl-agent (default: each)")
    parser.add_argument("--command-line", action="store_true", help="kvctl alone, which needs no compiler")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = ROOT / "build" / "wheels"
    shutil.rmtree(build, ignore_errors=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for old in arguments.out.glob("kvctl*.whl"):
        old.unlink()
    pack(build / "kvctl", command_line_files(), command_line_project(project), arguments.out)
    for arch in () if arguments.command_line else arguments.arch or ARCHITECTURES:
        tree = build / f"kvctl-agent-{arch}"
        paths = agent_files()
        copy(paths, tree)
        for extension in project["tool"]["setuptools"]["ext-modules"]:
            compile_extension(extension, arch, tree)
        pack(tree, paths, agent_project(project), arguments.out, f"manylinux_{GLIBC.replace('.', '_')}_{arch}")
    for wheel in sorted(arguments.out.glob("kvctl*.whl")):
        print(f"wheels: {wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


def files(folder: Path) -> Iterator[Path]:
    """Yields the modules, stubs and data files below a folder."""
    return (path for path in folder.rglob("*") if path.suffix in DATA and path.is_file())


def command_line_files() -> list[Path]:
    """Returns the files of the distribution `kvctl`."""
    shared = (ROOT / "kvctl_agent" / name for name in SHARED)
    return [*files(ROOT / "kvctl"), *(file for path in shared for file in ([path] if path.is_file() else files(path)))]


def agent_files() -> list[Path]:
    """Returns the files of the distribution `kvctl-agent`, without what is compiled."""
    package = ROOT / "kvctl_agent"
    return [path for path in files(package) if path.relative_to(package).parts[0] not in SHARED]


def command_line_project(project: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata of `kvctl`: its extras install the agent of the same version."""
    metadata = dict(project["project"])
    extras = metadata["optional-dependencies"]
    metadata["optional-dependencies"] = {
        **{name: extras[name] for name in extras if name not in ("docs", "dev", "all-cpu")},
        "agent": [f"kvctl-agent=={version()}"],
    }
    del metadata["entry-points"]  # the plugin for SGLang is the agent's
    return metadata


def agent_project(project: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata of `kvctl-agent`."""
    metadata = dict(project["project"])
    metadata["name"] = "kvctl-agent"
    metadata["description"] = (
        "The library in prefill and decode workers that moves their KV caches, with its native code."
    )
    metadata["dependencies"] = [f"kvctl=={version()}", *metadata["optional-dependencies"]["agent"]]
    del metadata["optional-dependencies"], metadata["scripts"]
    return metadata


def version() -> str:
    """Returns the version of both distributions."""
    sys.path.insert(0, str(ROOT))
    from kvctl_agent.contract import VERSION

    return VERSION


def compile_extension(extension: dict[str, Any], arch: str, tree: Path) -> None:
    """Compiles an extension module for a processor and puts it into its package.

    The headers of this Python serve for all processors: the stable ABI has no part that depends on them.
    """
    target = tree / Path(*extension["name"].split("."))
    cplusplus = extension.get("language") == "c++"
    compiler = f"{arch}-linux-gnu-{'g++' if cplusplus else 'gcc'}"  # Debian has it for its own processor, too
    if shutil.which(compiler) is None:
        sys.exit(f"wheels: {compiler} is missing: apt-get install g++-{arch.replace('_', '-')}-linux-gnu")
    sources = [str(ROOT / source) for source in extension["sources"]]
    compiled = target.with_suffix(".o")
    include = f"-I{sysconfig.get_path('include')}"
    flags = ["-fPIC", "-fvisibility=hidden", include, *extension["extra-compile-args"]]
    run([compiler, "-c", *flags, *sources, "-o", str(compiled)])
    libraries = ["-lpthread", *(f"-l{name}" for name in extension.get("libraries", ()))]
    if cplusplus:
        libraries += [found([compiler, f"-print-file-name={name}"]) for name in ("libstdc++.so.6", "libgcc_s.so.1")]
    link = [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-gnu.{GLIBC}", "-shared", "-Wl,--strip-all"]
    run([*link, str(compiled), *libraries, "-o", str(target.with_name(target.name + EXTENSION))])
    compiled.unlink()


def pack(tree: Path, paths: list[Path], metadata: dict[str, Any], out: Path, platform: str = "") -> None:
    """Builds a wheel of a copy of files; `platform` is that of native code in it."""
    copy(paths, tree)
    shutil.copy(ROOT / "LICENSE", tree)
    # README.md has links to other files of the checkout.
    shutil.copy(ROOT / "release" / "description.md", tree)
    metadata = {key: value for key, value in metadata.items() if key != "dynamic"}
    metadata |= {"version": version(), "readme": "description.md"}
    tool: dict[str, Any] = {
        "setuptools": {
            "packages": {"find": {"include": ["kvctl*"]}},
            "package-data": {"*": [f"*{suffix}" for suffix in sorted(DATA | {".so"}) if suffix != ".py"]},
        }
    }
    if platform:
        tool["distutils"] = {"bdist_wheel": {"py-limited-api": "cp311", "plat-name": platform}}
        (tree / "setup.py").write_text(
            "import setuptools\n\nsetuptools.Distribution.has_ext_modules = lambda self: True\nsetuptools.setup()\n"
        )
    build_system = {"requires": ["setuptools"], "build-backend": "setuptools.build_meta"}
    (tree / "pyproject.toml").write_text(
        tomli_w.dumps({"build-system": build_system, "project": metadata, "tool": tool})
    )
    options = ["-q", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
    epoch = {"SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", "1577836800")}
    run([sys.executable, "-m", "pip", "wheel", *options, "-w", str(out), str(tree)], **epoch)


def copy(paths: list[Path], tree: Path) -> None:
    """Copies files of the checkout into a tree."""
    for path in paths:
        target = tree / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def run(command: list[str], **environment: str) -> None:
    """Runs a command and ends this process if it fails."""
    if subprocess.run(command, env={**os.environ, **environment}, check=False).returncode:
        sys.exit(f"wheels: failed: {' '.join(command)}")


def found(command: list[str]) -> str:
    """Returns the output of a command."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
