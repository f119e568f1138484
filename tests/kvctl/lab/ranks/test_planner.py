"""The exit codes and messages of fleets that cannot be planned."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.lab.ranks import planner
from kvctl.lab.ranks.request import Load, PlanRequest, Sizes, Tokens


def request(**changes: Any) -> PlanRequest:
    wanted: dict[str, Any] = {"prefill": (Sizes(tp=2),), "decode": Sizes(), "memory_bytes": 1 << 30, "seed": 1}
    return PlanRequest(loads=(Load(1, Tokens((64,))),), **{**wanted, **changes})


def test_what_cannot_be_is_wrong_usage_with_its_arithmetic() -> None:
    with pytest.raises(CliError, match="8 % 3 = 2") as refused:
        planner.plan(request(prefill=(Sizes(tp=3),)))
    assert refused.value.code == ExitCode.USAGE


@pytest.mark.parametrize("transport", ["nixl", "loopback"])
def test_without_the_agents_packages_one_extra_with_the_engine_is_named(transport: str) -> None:
    code = (
        "import sys; sys.modules['msgspec'] = sys.modules['numpy'] = None;"
        f"from kvctl.cli import main; sys.exit(main(['bench', '--plan', '--transport', '{transport}']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    assert f"pip install '.[{'agent' if transport == 'loopback' else transport}]'" in done.stderr


def test_a_missing_engine_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "find_spec", lambda name: None)
    with pytest.raises(CliError, match=r"pip install '\.\[nixl\]'.*--transport loopback") as refused:
        planner.plan(request())
    assert refused.value.code == ExitCode.FAILED
    assert planner.plan(request(transport="loopback"))["transport"] == "loopback"


def test_an_engine_that_cannot_be_imported_is_named_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_LOG_DIR", "/tmp")
    with pytest.raises(CliError, match="MC_LOG_DIR ends the process") as refused:
        planner.plan(request(transport="mooncake"))
    assert refused.value.code == ExitCode.USAGE
