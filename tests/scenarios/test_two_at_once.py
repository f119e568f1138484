"""Two scenarios of `kvctl demo` at the same time: each acts on a rank of its own, and `kvctl doctor` names both."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.scenarios.conftest import PATIENCE_S, POLL_S


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("scenarios", "found"),
    [
        pytest.param(
            "dead-peer,corrupt",
            {"KV_PEER_LOST": "decode-1", "KV_CHECKSUM_MISMATCH": "prefill-1"},
            marks=pytest.mark.sample,
        ),
        ("compat,dead-peer", {"KV_COMPAT_MISMATCH": "decode-1", "KV_PEER_LOST": "decode-0"}),
    ],
)
def test_doctor_names_both(demo: Callable[..., Any], scenarios: str, found: dict[str, str]) -> None:
    fleet = demo("--fault", scenarios, "--transport", "loopback")
    for scenario in scenarios.split(","):
        fleet.said(f"{scenario}: ")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        rows = json.loads(fleet.kvctl("doctor", "-o", "json").stdout)["data"]
        said = {row["code"]: row["subject"] for row in rows if row["severity"] == "critical"}
        if found.items() <= said.items():
            break
        time.sleep(POLL_S)
        assert time.monotonic() < deadline, f"doctor never said {found}, but {said}"
    failed = json.loads(fleet.kvctl("rooms", "failed", "--by", "cause", "-o", "json").stdout)["data"]
    assert {row["code"] for row in failed} >= found.keys() & {"KV_CHECKSUM_MISMATCH"}
