"""Health of a fleet that a file remembers: this host has no part in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("toy_codes")


@pytest.fixture
def file(fleet: Any, kvctl: Any, tmp_path: Path) -> str:
    """Two moments of the fleet."""
    path = tmp_path / "moments"
    assert kvctl("record", str(path), "--for", "0.2s", "--every", "0.1s").code == 0
    return str(path)


def codes(out: str) -> list[str]:
    return [row["code"] for row in json.loads(out)["data"]]


def test_findings_are_those_of_the_file_compared_with_its_moment_before(file: str, kvctl: Any) -> None:
    outcome = kvctl("health", "--from", file, "-o", "json")
    assert outcome.code == 1
    assert codes(outcome.out) == ["KV_RING_FULL", "KV_RING_FULL", "KV_FLEET_YOUNG"]


def test_a_watch_of_a_file_ends_with_it(file: str, kvctl: Any) -> None:
    outcome = kvctl("check", "staging", "--from", file, "-w", "0.01")
    assert outcome.code == 2
    heads = [line for line in outcome.out.splitlines() if line.startswith("KVCTL ")]
    assert len(heads) >= 2
    assert kvctl("health", "--from", file, "-w", "0.01").code == 1
    assert kvctl("status", "--from", file, "-w", "0.01").code == 0
