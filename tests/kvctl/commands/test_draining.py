"""Every command that lists agents shows that an agent drains, and the command that resumes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvctl.health.codes.ready import agent_draining

S = 1_000_000_000
RESUME = "kvctl resume decode-1"


@pytest.fixture(autouse=True)
def this_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl.commands.health_query.CODES", (agent_draining,))
    monkeypatch.setattr("kvctl.commands.health_query.PAUSE_S", 0.0)


def drained(start: Any, canned: Any, *names: str) -> None:
    for name in canned.FLEET:
        told = {"draining": True, "accepting": False, "draining_age_ns": 42 * S} if name in names else {}
        answer = {**canned.status(name), **told}
        start(name, {"status": lambda _, answer=answer: answer}, draining=name in names)


def test_one_of_two_decode_ranks(start: Any, canned: Any, kvctl: Any) -> None:
    drained(start, canned, "decode-1")
    status = kvctl("status", "-o", "table").out
    assert "✓ no problem in one reading, 1 info (kvctl health)" in status
    assert f"draining decode-1 for 42 s, no new rooms: {RESUME}" in status
    rows = {row["agent"]: row["state"] for row in json.loads(kvctl("agents", "-o", "json").out)["data"]}
    assert (rows["decode-0"], rows["decode-1"]) == ("ok", "draining")
    health = kvctl("health", "-o", "table").out
    assert "KV_DRAINING" in health
    assert "decode-1 is draining, for 42 s now, and accepts no new rooms" in " ".join(health.split())
    doctor = kvctl("doctor", "-o", "json")
    (found,) = [row for row in json.loads(doctor.out)["data"] if row["code"] == "KV_DRAINING"]
    assert (found["severity"], found["next"]) == ("info", RESUME)
    check = kvctl("check")
    assert check.code == 0
    assert check.out.startswith("KVCTL OK - agents 4, ring 37.5 %, active 2, room age 9 s, draining 1 | ")
    assert "'draining'=1;;;0;" in check.out


def test_all_decode_ranks(start: Any, canned: Any, kvctl: Any) -> None:
    drained(start, canned, "decode-0", "decode-1")
    lines = kvctl("status", "-o", "table").out.splitlines()
    assert "! KV_DRAINING decode-0" in lines[0]
    assert all("KV_DRAINING" in line for line in lines if line.startswith("decode-"))
    check = kvctl("check", "ready")
    assert check.code == 1
    assert check.out.startswith("KVCTL READY WARNING - KV_DRAINING decode-0: decode-0 and decode-1 are draining")
    assert "\nnext: kvctl resume decode-0 decode-1" in kvctl("doctor", "-o", "table").out


def test_the_row_of_an_agent_that_drains_is_not_ok(start: Any, canned: Any, kvctl: Any) -> None:
    drained(start, canned, "decode-1")
    out = kvctl("status", "-o", "table", "--columns", "agent,health").out
    cells = dict(line.split() for line in out.splitlines() if line.startswith(("prefill-", "decode-")))
    assert cells == {"prefill-0": "ok", "prefill-1": "ok", "decode-0": "ok", "decode-1": "draining"}
