"""The reply to `health`: what is left out, and that nothing a health code reads is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kvctl.health
from kvctl_agent.contract.health import HEALTH_METRICS, HEALTH_SETTINGS
from kvctl_agent.contract.metrics import METRICS_BY_NAME
from kvctl_agent.observer.health import health

S = 1_000_000_000
NOW = 1_760_000_000 * S
SOURCES = [path.read_text() for path in Path(kvctl.health.__path__[0]).rglob("*.py")]


def room(number: int, age_s: float, **changes: Any) -> dict[str, Any]:
    ages = {"state_age_ns": round(age_s * S), "age_ns": round(age_s * S)}
    row = {"room": str(number), "state": "Transferring", "finished_at_ns": None, "failure": None}
    return {**row, "peers": [], "missing": [], "owed": {}, **ages, **changes}


def peer(**changes: Any) -> dict[str, Any]:
    row = {"peer": "decode-0", "state": "ready", "last_heard_ns": S // 2, "control_queue": 0, "differences": []}
    lane = {"former": [], "lane_kind": None, "lane_expected": None, "lane_gb_per_s": 9.0, "same_host": True}
    network = {"unheard_ns": S // 2, "oldest_write_ns": None, "wire_ns": 1_000_000}
    return {**row, **lane, **network, "incarnation": "c0ffee", "peer_host": "n1", **changes}


def allocation(age_s: float, **changes: Any) -> dict[str, Any]:
    return {"age_ns": round(age_s * S), "state": "granted", "aside": False, "writer": "prefill-0", **changes}


def answer(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "status": {"integration": None, "memory_gb_per_s": 8.0},
        "rooms": [],
        "failed": {"rooms": [], "kept": 0, "dropped_total": 0},
        "staging": {"ring": None, "gated": []},
        "peers": [],
        "metrics": [],
        "config": [],
    }
    return health(**{**parts, **changes}, now_ns=NOW)


def test_young_rooms_are_counted_and_left_out() -> None:
    found = answer(rooms=[room(1, 60), room(2, 4), room(3, 1), room(4, 1, state="Failed")])
    assert [row["room"] for row in found["rooms"]] == ["1", "4"]
    assert found["omitted"]["rooms"] == 2
    assert found["oldest_room_ns"] == 60 * S


@pytest.mark.parametrize(
    "odd",
    [
        {"state": "suspect"},
        {"last_heard_ns": 3 * S},
        {"unheard_ns": 3 * S},
        {"oldest_write_ns": 2 * S},
        {"wire_ns": 20_000_000},
        {"control_queue": 100},
        {"differences": ["page_size 64 ≠ 32"]},
        {"former": ["process 1 on n2"]},
        {"lane_expected": "rdma", "lane_kind": "tcp through the host"},
        {"lane_gb_per_s": 0.1},
    ],
)
def test_peers_that_are_not_in_order_remain(odd: dict[str, Any]) -> None:
    found = answer(peers=[peer(), peer(**odd), peer(last_heard_ns=None, lane_gb_per_s=None)])
    assert found["peers"] == [peer(**odd)]
    assert found["omitted"]["peers"] == 2


def test_all_peers_of_an_observed_engine_remain() -> None:
    found = answer(status={"integration": {"mode": "observe"}, "memory_gb_per_s": None}, peers=[peer()])
    assert found["peers"] == [peer()]


def test_allocations_and_gated_parts_remain_as_a_whole_or_not_at_all() -> None:
    def staging(*allocations: dict[str, Any], gated: tuple[int, ...] = ()) -> Any:
        parts = [{"age_ns": age * S, "asked_age_ns": None, "peer": "decode-0"} for age in gated]
        return answer(staging={"ring": {"allocations": list(allocations)}, "gated": parts})["staging"]

    assert staging(allocation(0.1), allocation(1), gated=(1,)) == {"ring": {"allocations": []}, "gated": []}
    assert len(staging(allocation(0.1), allocation(9))["ring"]["allocations"]) == 2
    assert len(staging(allocation(0.1), allocation(0.1, state="revoking"))["ring"]["allocations"]) == 2
    assert len(staging(gated=(1, 9))["gated"]) == 2


def test_peers_that_what_remains_names_can_be_identified() -> None:
    peers = [peer(peer=f"decode-{number}") for number in range(5)]
    failure = {"rank": "decode-2"}
    failed = {"rooms": [room(1, 1, finished_at_ns=NOW, failure=failure)], "kept": 1, "dropped_total": 0}
    ring = {"allocations": [allocation(9, writer="decode-3, decode-9")]}
    rooms = [room(2, 60, peers=["decode-0"]), room(3, 1, peers=["decode-4"])]
    found = answer(peers=peers, failed=failed, staging={"ring": ring, "gated": []}, rooms=rooms)
    assert [row["peer"] for row in found["mentioned"]] == ["decode-0", "decode-2", "decode-3"]
    assert found["mentioned"][0] == {"peer": "decode-0", "incarnation": "c0ffee", "peer_host": "n1"}


def test_of_failed_rooms_only_recent_ones_and_a_limited_number_remain() -> None:
    rooms = [room(number, 1, finished_at_ns=NOW - number * 60 * S) for number in range(15)]
    found = answer(failed={"rooms": rooms, "kept": 40, "dropped_total": 3})
    assert [row["room"] for row in found["failed"]["rooms"]] == [str(number) for number in range(11)]
    many = [room(number, 1, finished_at_ns=NOW) for number in range(200)]
    found = answer(failed={"rooms": many, "kept": 200, "dropped_total": 3})
    assert (len(found["failed"]["rooms"]), found["omitted"]["failed"], found["failed"]["kept"]) == (20, 180, 200)


def test_every_metric_and_setting_that_health_codes_read_is_declared() -> None:
    text = "\n".join(SOURCES)
    metrics = {name for name in re.findall(r'"(kvctl_[a-z_]+)"', text) if name in METRICS_BY_NAME}
    settings = set(re.findall(r'(?:setting|period_ns)\("(\w+)"\)', text)) | set(re.findall(r'"(\w+_timeout_s)"', text))
    assert (metrics, settings) == (set(HEALTH_METRICS), set(HEALTH_SETTINGS))
