"""A prefill rank is stopped longer than its peers wait for it, and goes on: what is shown of the rooms that failed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState

pytestmark = pytest.mark.timeout(480)
PATIENCE_S = 200.0


def failed(fleet: Any) -> list[dict[str, Any]]:
    """Rooms that all of their ranks know as failed, once the stopped one has learnt of it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        done = fleet.kvctl("rooms", "failed", "--filter", "code=KV_PEER_LOST", "-o", "json")
        rows: list[dict[str, Any]] = json.loads(done.stdout or '{"data": []}')["data"]
        known = [row for row in rows if {"prefill-0", "prefill-1", row["rank"]} <= set(row["agents"])]
        if known:
            return known
        assert time.monotonic() < deadline, f"prefill-0 never told of a room that failed while it was stopped: {rows}"
        time.sleep(1)


def test_rooms_that_failed_while_a_rank_was_stopped(demo: Callable[..., Any]) -> None:
    fleet = demo("--fault", "pause=prefill-0@2s+20s", "--transport", "loopback", "--concurrency", "6")
    fleet.said("serve after")
    row = failed(fleet)[0]
    assert "peer prefill-0" in row["text"]
    assert row["after_ns"] > 0
    (room,) = json.loads(fleet.kvctl("rooms", "show", row["room"], "-o", "json").stdout)["data"]
    assert room["state"] == RoomState.FAILED.label
    assert room["first_failing_rank"] == row["rank"]
    assert {rank["agent"] for rank in room["ranks"]} >= {"prefill-0", "prefill-1", row["rank"]}
    moments = [event["relative_ns"] for event in room["timeline"]]
    assert moments == sorted(moments)
    assert moments[0] >= 0
    learnt = {event["agent"]: event["relative_ns"] for event in room["timeline"] if event["stage"] == "fail"}
    assert min(learnt, key=lambda agent: learnt[agent]) == row["rank"]
    assert learnt["prefill-0"] > learnt["prefill-1"]
    text = fleet.kvctl("rooms", "show", row["room"], "-o", "table").stdout
    assert len(re.findall(r"^room \d+", text, re.MULTILINE)) == 1
    assert re.search(rf"^failed first: {row['rank']} at \+[\d.]+ s: KV_PEER_LOST", text, re.MULTILINE)
    assert "did not answer" not in text
    # A filter finds them before it is limited, though rooms succeed all the time.
    chosen = fleet.kvctl("rooms", "history", "-n", "1", "--filter", "state=Failed", "-l", "role=decode", "-o", "json")
    assert {each["state"] for each in json.loads(chosen.stdout)["data"]} == {"Failed"}
