"""What a person who installs, reads or packages this repository may rely on."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvctl_agent.contract import VERSION, extras

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
MODULES = sorted(
    path
    for folder in ("kvctl", "kvctl_agent", "examples", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
PACKAGED = [path for path in MODULES if path.relative_to(ROOT).parts[0] in {"kvctl", "kvctl_agent"}]
MAX_MODULE_BYTES = 40_000


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def loaded_after(statement: str) -> set[str]:
    """Top-level names of the modules a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=250)
    return set(json.loads(run.stdout))


class TestImports:
    def test_the_agent_package_alone_is_light(self) -> None:
        heavy = {"torch", "numpy", "zmq", "msgspec", "nixl", "orjson"}
        assert not heavy & loaded_after("import kvctl_agent")

    @pytest.mark.parametrize("package", ["contract", "host"])
    def test_what_both_packages_share_is_standard_library_only(self, package: str) -> None:
        names = [path.stem for path in (ROOT / "kvctl_agent" / package).glob("*.py") if path.stem != "__init__"]
        loaded = loaded_after("\n".join(f"import kvctl_agent.{package}.{name}" for name in names))
        bare = loaded_after("pass")
        assert loaded - bare - set(sys.stdlib_module_names) == {"kvctl_agent"}

    def test_the_command_line_loads_neither_torch_nor_textual(self) -> None:
        assert not {"torch", "numpy", "msgspec", "textual"} & loaded_after("import kvctl.cli")

    def test_commands_that_start_ranks_load_the_agent_only_when_they_run(self) -> None:
        loaded = loaded_after("import kvctl.commands.bench, kvctl.commands.demo, kvctl.commands.tune")
        assert not {"torch", "numpy", "msgspec"} & loaded


class TestMetadata:
    def test_the_version_has_one_value(self) -> None:
        assert "version" not in PROJECT["project"]
        assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kvctl_agent.contract.VERSION"}

    def test_the_changelog_knows_the_version_or_has_unreleased_changes(self) -> None:
        text = (ROOT / "CHANGELOG.md").read_text()
        assert re.search(rf"^## \[(Unreleased|{re.escape(VERSION)})\]", text, re.MULTILINE)

    def test_installs_name_extras_that_exist(self) -> None:
        """Texts of the program come from `contract.extras`, which knows whether it runs from a checkout."""
        for path in tracked_files():
            if path.name in {"pyproject.toml", Path(__file__).name} or path.suffix in {".json", ".svg", ".xz"}:
                continue
            text = path.read_text(errors="replace")
            lists = re.findall(r"'(?:\.|kvctl)\[([\w,-]+)\]'", text)
            named = {name for names in lists for name in names.split(",")}
            named.update(re.findall(r"\bextras? `([\w-]+)`", text))
            if path in PACKAGED and path.name != "extras.py":
                assert not re.search(r"install '(\.|kvctl)\b", text), path
                named.update(re.findall(r"\binstall\(['\"]([\w-]+)['\"]\)", text))
                named.update(re.findall(r"kvctl's extra ([a-z]+)", text))
            assert named <= EXTRAS.keys(), path

    def test_wheels_name_themselves_and_a_checkout_itself(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        assert extras.install("nixl") == "`pip install '.[nixl]'` in a checkout of kvctl"
        monkeypatch.setattr(extras, "_PROJECT", tmp_path / "pyproject.toml")
        assert extras.install("nixl") == "`pip install 'kvctl[nixl]'`"

    def test_wheels_contain_every_kind_of_file_that_the_packages_have(self) -> None:
        (kinds,) = re.findall(r"^DATA = (\{.*\})$", (ROOT / "release" / "wheels.py").read_text(), re.MULTILINE)
        packaged = [path for path in tracked_files() if path.relative_to(ROOT).parts[0] in {"kvctl", "kvctl_agent"}]
        assert {path.suffix for path in packaged} - {".c", ".cpp", ".h"} == ast.literal_eval(kinds)

    def test_the_promised_extras_exist(self) -> None:
        promised = {
            "agent",
            "nixl",
            "mooncake",
            "mooncake-cuda13",
            "mooncake-cpu",
            "gpu",
            "dev",
            "all-cpu",
            "prometheus",
            "otel",
            "sglang",
            "vllm",
            "report",
            "kubernetes",
            "mcp",
            "docs",
        }
        assert set(EXTRAS) == promised

    def test_the_operators_side_needs_no_heavy_package(self) -> None:
        assert not {"torch", "numpy", "msgspec", "nixl"} & names(PROJECT["project"]["dependencies"])

    def test_both_packages_ship_their_type_marker(self) -> None:
        data = PROJECT["tool"]["setuptools"]["package-data"]
        for package in ("kvctl", "kvctl_agent"):
            assert "py.typed" in data[package]
            assert (ROOT / package / "py.typed").is_file()

    def test_every_package_folder_is_a_package(self) -> None:
        folders = {path.parent for path in PACKAGED}
        assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []

    def test_the_license_is_the_apache_license(self) -> None:
        text = (ROOT / "LICENSE").read_text()
        assert "Apache License" in text
        assert "END OF TERMS AND CONDITIONS" in text

    def test_the_constraints_pin_everything_that_make_setup_asks_for(self) -> None:
        lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.!]*", line) for line in lines), (
            "names and versions only"
        )
        wanted = names(PROJECT["project"]["dependencies"])
        for extra in ("agent", "nixl", "dev"):
            wanted |= names(EXTRAS[extra])
        assert wanted - {"kvctl"} <= names(lines)

    def test_make_and_the_constraints_agree_on_torch(self) -> None:
        makefile = (ROOT / "Makefile").read_text()
        constraints = (ROOT / "constraints.txt").read_text()
        assert re.search(r"^TORCH := (\S+)$", makefile, re.MULTILINE).group(1) in constraints.splitlines()  # type: ignore[union-attr]


class TestRepository:
    def test_the_readme_leads_with_its_two_commands(self) -> None:
        text = (ROOT / "README.md").read_text()
        assert "make bench" in text
        assert "make test" in text

    def test_ci_runs_the_readmes_test_command(self) -> None:
        assert "make test" in (ROOT / ".ci/run").read_text()

    def test_make_help_names_every_public_target(self) -> None:
        help_text = subprocess.run(
            ["make", "--no-print-directory"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        assert {"setup", "bench", "test", "test-all", "check"} <= set(
            re.findall(r"^make (\S+)", help_text.stdout, re.MULTILINE)
        )

    def test_every_module_says_why_it_exists(self) -> None:
        assert [path for path in PACKAGED if not ast.get_docstring(ast.parse(path.read_text()))] == []

    def test_no_module_outgrows_a_reader(self) -> None:
        sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in MODULES}
        assert {name: size for name, size in sizes.items() if size > MAX_MODULE_BYTES} == {}

    def test_no_tracked_file_names_an_authors_folder(self) -> None:
        authors = re.compile(rb"/(work|root|home/\w+|opt/(wheels|pypi))/")
        files = [path for path in tracked_files() if path != Path(__file__)]
        assert [str(path.relative_to(ROOT)) for path in files if authors.search(path.read_bytes())] == []


def names(requirements: list[str]) -> set[str]:
    """Normalized distribution names of requirement lines."""
    return {re.split(r"[\[=<>~!;\s]", line, maxsplit=1)[0].lower().replace("_", "-") for line in requirements}
