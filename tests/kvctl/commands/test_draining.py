"""An agent that drains: every command that lists agents shows it, and `drain --wait` waits for its rooms."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvctl.health.codes.ready import agent_draining
from kvctl_agent.contract.admin import ErrorCode
from tests.support.answers import refusal

S = 1_000_000_000
RESUME = "kvctl resume decode-1"


@pytest.fixture(autouse=True)
def this_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl.health.engine.CODES", (agent_draining,))
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
    rows = {row["agent"]: row["state"] for row in kvctl("agents", "-o", "json").data}
    assert (rows["decode-0"], rows["decode-1"]) == ("ok", "draining")
    health = kvctl("health", "-o", "table").out
    assert "KV_DRAINING" in health
    assert "decode-1 is draining, for 42 s now, and accepts no new rooms" in " ".join(health.split())
    doctor = kvctl("doctor", "-o", "json")
    (found,) = [row for row in doctor.data if row["code"] == "KV_DRAINING"]
    assert (found["severity"], found["next"]) == ("info", RESUME)
    assert kvctl("check").code == 0


@pytest.fixture
def draining_agent(start: Any, canned: Any) -> Callable[..., list[int]]:
    """Starts decode-0, which drains on request and has one active room for that many further readings."""

    def make(readings: int) -> list[int]:
        left = [readings]
        state = {"draining": False}

        def drain(_: Any) -> Any:
            state["draining"] = True
            return [{"agent": "decode-0", "subject": "decode-0", "result": "draining", "text": "1 room is active"}]

        def status(_: Any) -> Any:
            left[0] -= state["draining"]
            rooms = {"Transferring": 1} if left[0] >= 0 else {}
            return {**canned.status("decode-0"), "draining": state["draining"], "rooms": rooms}

        start("decode-0", {"status": status, "drain": drain})
        return left

    return make


def test_drain_waits_for_the_rooms(draining_agent: Any, kvctl: Any) -> None:
    left = draining_agent(2)
    outcome = kvctl("drain", "--all", "--yes", "--wait", "60s")
    assert (outcome.code, outcome.err) == (0, "kvctl: 1 agent drained\n")
    assert "draining" in outcome.out
    assert left[0] == -1


def test_drain_ends_when_its_time_is_up(
    draining_agent: Any, kvctl: Any, at_best: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvctl.commands.wait._LAST_SURVEY_NS", 60_000_000_000)  # a slow answer is no other text
    monkeypatch.setenv("KVCTL_TIMEOUT", "60s")

    def took() -> float:
        draining_agent(1 << 30)
        began = time.monotonic()
        outcome = kvctl("drain", "decode-0", "--yes", "--wait", "2s")
        assert outcome.code == 4
        assert "not drained within 2s; missing: decode-0: 1 room active" in outcome.err
        return time.monotonic() - began

    at_best(took, 3)


def test_an_agent_that_ends_while_it_drains_has_drained(start: Any, canned: Any, kvctl: Any) -> None:
    """The preStop hook of a pod whose engine ends by itself."""
    servers: list[Any] = []

    def drain(_: Any) -> Any:
        threading.Timer(0.1, servers[0].close).start()
        return [{"agent": "decode-0", "subject": "decode-0", "result": "draining", "text": ""}]

    busy = {**canned.status("decode-0"), "draining": True, "rooms": {"Transferring": 1}}
    servers.append(start("decode-0", {"status": lambda _: busy, "drain": drain}))
    outcome = kvctl("drain", "decode-0", "--yes", "--wait", "60s")
    assert (outcome.code, outcome.err) == (0, "kvctl: 0 agents drained, 1 agent ended\n")


def test_a_drain_that_failed_is_not_waited_for(start: Any, canned: Any, kvctl: Any) -> None:
    drain = refusal(ErrorCode.REFUSED, "SGLang owns admission")
    start("decode-0", {"status": lambda _: canned.status("decode-0"), "drain": drain})
    outcome = kvctl("drain", "decode-0", "--yes", "--wait", "60s")
    assert outcome.code == 1
    assert "SGLang owns admission" in outcome.err
    assert "takes new rooms" not in outcome.err, "what wait says of an agent that does not drain"
