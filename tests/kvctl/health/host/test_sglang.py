"""Checks of the command line of an SGLang server, on a simulated host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from kvctl.health.finding import Severity
from kvctl.health.host.inspection import command_facts
from kvctl.health.host.view import Fact, HostView, ImportProblem, sglang_problem

SITE = "venv/lib/python3.12/site-packages"
PACKAGES = ("sglang-0.5.23.dist-info", "kvctl-0.1.0.dist-info", "nixl_cu12-1.5.1.dist-info")
PREFILL = ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "kvctl")
DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "kvctl")
MODULE = ("/venv/bin/python3", "-W", "ignore", "-m", "sglang.launch_server", "--model-path", "M")
SCRIPT = ("sglang", "serve", "--model-path", "M")

Examine = Callable[..., list[Fact]]


@pytest.fixture
def examine(tmp_path: Path) -> Examine:
    """Returns the facts about a command line: `examine(argv, environ=…, packages=…, listening=…, problem=…)`."""

    def facts(
        argv: Sequence[str],
        environ: Mapping[str, str] | None = None,
        packages: Sequence[str] = PACKAGES,
        listening: Sequence[int] = (),
        problem: ImportProblem | None = None,
    ) -> list[Fact]:
        for name in packages:
            (tmp_path / SITE / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "venv/bin").mkdir()
        (tmp_path / "venv/bin/python3").write_text("")
        (tmp_path / "venv/bin/sglang").write_text("#!/venv/bin/python3\n")
        (tmp_path / "proc/net").mkdir(parents=True)
        rows = [f"{n}: 00000000:{port:04X} 00000000:0000 0A 0 0 0 0 0 1" for n, port in enumerate(listening)]
        (tmp_path / "proc/net/tcp").write_text("\n".join(["sl", *rows]))
        self_imports: list[str] = []

        def imports(python: str, variables: Mapping[str, str]) -> ImportProblem | None:
            self_imports.append(python)
            return problem

        host = HostView(tmp_path, environ={"PATH": "/venv/bin", **(environ or {})}, sglang_problem=imports)
        found = command_facts(host, argv)
        assert found is not None
        assert self_imports in ([], ["/venv/bin/python3"]), "the import is that of the server's Python"
        return found

    return facts


@pytest.mark.parametrize("start", [MODULE, ("env", "KVCTL_SGLANG=backend", *MODULE), SCRIPT])
def test_a_command_without_a_problem(examine: Examine, start: Sequence[str]) -> None:
    (fact,) = examine([*start, *PREFILL, "--port=30010"])
    assert (fact.topic, fact.severity) == ("SGLang", Severity.INFO)
    assert fact.found == "this command (prefill, port 30010), bootstrap port 8998"
    assert fact.means == "its Python imports SGLang, which kvctl's plugin fits, in mode backend"


@pytest.mark.parametrize(
    ("options", "environ", "found", "means"),
    [
        ((), {}, "no --disaggregation-mode", "neither sends nor receives"),
        (DECODE, {"KVCTL_SGLANG": "obsreve"}, "KVCTL_SGLANG=obsreve", "invalid choice: 'kvctl'"),
        (DECODE, {"KVCTL_SGLANG": "observe"}, "KVCTL_SGLANG=observe", "invalid choice: 'kvctl'"),
        (DECODE[:2], {}, "--disaggregation-transfer-backend mooncake", "not visible to kvctl"),
        (DECODE, {"SGLANG_PLUGINS": "other"}, "SGLANG_PLUGINS=other", "does not load kvctl's plugin"),
        (DECODE, {"KVCTL_STAGING_RING_MB": "much"}, "KVCTL_STAGING_RING_MB", "the agent refuses it"),
        ((*PREFILL, "--host", "0.0.0.0"), {}, "listens on 0.0.0.0 without a key", "does not start"),
    ],
)
def test_what_is_wrong_with_options_and_environment(
    examine: Examine, options: Sequence[str], environ: Mapping[str, str], found: str, means: str
) -> None:
    (fact,) = examine([*MODULE, *options], environ)
    assert fact.severity is Severity.WARNING
    assert found in fact.found
    assert means in fact.means
    assert fact.remedy


@pytest.mark.parametrize(
    ("mode", "backend"), [("replace", "nixl"), ("replace", "kvctl"), ("observe", "nixl"), ("observe", "mooncake")]
)
def test_backends_that_fit_the_other_modes(examine: Examine, mode: str, backend: str) -> None:
    (fact,) = examine([*MODULE, *DECODE[:3], backend], {"KVCTL_SGLANG": mode})
    assert fact.severity is Severity.INFO


def test_ports_in_use(examine: Examine) -> None:
    found = examine([*MODULE, *PREFILL, "--disaggregation-bootstrap-port", "9000"], listening=(9000, 30000))
    assert [fact.code for fact in found] == ["KV_PORT_CLASH", "KV_PORT_CLASH"]
    assert "--port 30000 is in use" in found[0].found
    assert "--disaggregation-bootstrap-port 9000 is in use" in found[1].found


def test_an_import_that_fails_is_told_with_its_cause(examine: Examine) -> None:
    problem = "SGLang 0.5.23 cannot be imported: ModuleNotFoundError: No module named 'torchvision'"
    (fact,) = examine([*MODULE, *DECODE], problem=ImportProblem(problem))
    assert fact.severity is Severity.WARNING
    assert fact.found.endswith(problem)
    assert "install what is missing" in fact.remedy


def test_packages_that_are_missing(examine: Examine) -> None:
    kvctl, nixl = examine([*MODULE, *DECODE], packages=PACKAGES[:1], problem=ImportProblem("not asked"))
    assert kvctl.found.endswith("kvctl is not installed there")
    assert nixl.found.endswith("NIXL is not installed there")


def test_a_python_that_is_not_there(examine: Examine) -> None:
    (fact,) = examine(["/opt/bin/python", *MODULE[1:], *DECODE])
    assert "its Python was not found" in fact.found


def test_other_commands_are_none() -> None:
    assert command_facts(HostView(), ["python", "-m", "http.server"]) is None


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("echo noise >&2; exit 0", ""),
        ("echo noise; echo the cause; echo noise >&2; exit 1", "the cause"),
        ("echo Traceback >&2; echo \"No module named 'kvctl_agent'\" >&2; exit 1", "No module named 'kvctl_agent'"),
        ("exit 9", "exit code 9"),
    ],
)
def test_what_a_python_tells(tmp_path: Path, script: str, cause: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    assert sglang_problem(str(python), os.environ) == (ImportProblem(cause) if cause else None)


def test_a_python_that_cannot_be_run(tmp_path: Path) -> None:
    problem = sglang_problem(str(tmp_path / "none"), os.environ)
    assert problem is not None
    assert problem.cause.startswith("SGLang cannot be imported: ")


def test_an_import_that_takes_too_long_has_its_own_effect_and_remedy(examine: Examine) -> None:
    problem = sglang_problem(sys.executable, os.environ, 0.001)
    assert problem is not None
    assert problem.cause.startswith("importing SGLang takes longer than 0.001 s: ")
    (fact,) = examine([*MODULE, *DECODE], problem=problem)
    assert "not known whether kvctl's plugin fits" in fact.means
    assert fact.remedy == "try again when the host is less busy"
