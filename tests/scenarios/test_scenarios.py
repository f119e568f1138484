"""Every scene of `kvctl demo` is really there, and `kvctl doctor` names it first: who it is, the numbers, what to do.

Some of them take a while to be seen, since most of what looks like them mends itself: they begin before the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvctl.health.codes import CODES_BY_NAME
from kvctl.lab.demo.scenarios import SCENARIOS, SCENARIOS_BY_NAME

Start = Callable[..., Any]
Begun = dict[str, Any]

pytestmark = [pytest.mark.timeout(480), pytest.mark.usefixtures("begun")]


def test_every_scene_has_a_code_that_doctor_knows() -> None:
    assert {scene.code for scene in SCENARIOS} <= CODES_BY_NAME.keys()
    tested = {"stuck-room", "pinned-ring", "dead-peer", "slow-layer", "corrupt", "compat", "bootstrap", "fd-low"}
    tested |= {"grant-loss", "gated-empty", "oversized-chunk", "plan-mismatch", "stuck-waiting", "stuck-scatter"}
    tested |= {"draining"}
    assert tested == SCENARIOS_BY_NAME.keys()
    assert all(scene.look[0].startswith("kvctl ") for scene in SCENARIOS)


def test_a_dead_peer(demo: Start) -> None:
    fleet = demo("--fault", "dead-peer")
    pid = re.search(r"decode-1 \(pid (\d+)\) is killed", fleet.said("dead-peer:"))
    found = fleet.diagnosed("KV_PEER_LOST")
    assert found["subject"] == "decode-1"
    assert found["severity"] == "critical"
    assert pid is not None
    assert pid[1] in found["cause"]
    assert set(found["evidence"]["missed_by"]) == {"prefill-0", "prefill-1"}
    fleet.shows(found, r"prefill-0\s+decode-1\s+lost\b", r"prefill-1\s+decode-1\s+lost\b")


def test_bytes_that_change_on_the_wire(demo: Start) -> None:
    fleet = demo("--fault", "corrupt")
    fleet.said("prefill-1 has a wrong byte")
    found = fleet.diagnosed("KV_CHECKSUM_MISMATCH")
    assert "prefill-1" in found["subject"]
    assert found["severity"] == "critical"
    assert re.search(
        r"from prefill-1 \((direct|staged|in-place)\) was sent with checksum [0-9a-f]{8}", found["evidence"]["latest"]
    )
    fleet.shows(found, "KV_CHECKSUM_MISMATCH", "prefill-1")
    history = json.loads(fleet.kvctl("rooms", "history", "--filter", "state=Failed", "-o", "json").stdout)["data"]
    assert {row["failure"]["code"] for row in history} == {"KV_CHECKSUM_MISMATCH"}


def test_a_writer_whose_layers_lag(demo: Start) -> None:
    fleet = demo("--fault", "slow-layer", "--transport", "loopback")
    fleet.said("every write of prefill-1 leaves 0.2 s late")
    found = fleet.diagnosed("KV_LANE_SLOW")
    assert found["subject"] == "prefill-1"
    assert found["evidence"]["wire_a_part_ns"] >= 100_000_000  # the mean since the start, perhaps
    assert found["evidence"]["others_wire_a_part_ns"] < found["evidence"]["wire_a_part_ns"]
    fleet.shows(found, "prefill-0", "prefill-1")
    rows = json.loads(fleet.kvctl(*found["next"].split()[1:], "-o", "json").stdout)["data"]
    wire_ns: dict[str, list[int]] = {}
    for row in rows:
        if (p50_ns := row["stages"]["wire"]["p50_ns"]) is not None:
            wire_ns.setdefault(row["agent"], []).append(p50_ns)
    assert max(wire_ns["prefill-1"]) > 5 * min(wire_ns["prefill-0"]), wire_ns
    # What the fleet does meanwhile is no reason to measure nothing, and status sees what doctor sees.
    probed = fleet.kvctl("peers", "probe", "--busy", "prefill-1", "decode-0", "-o", "json")
    assert probed.returncode == 0, probed.stderr
    # One reading has the mean since the start, which has to grow.
    fleet.until_status_names("KV_LANE_SLOW", "prefill-1")


def test_a_ring_that_is_smaller_than_a_part(demo: Start) -> None:
    fleet = demo("--fault", "oversized-chunk", "--transport", "loopback")
    fleet.said("decode-1 has a ring of 1 MiB")
    found = fleet.diagnosed("KV_CHUNK_OVERSIZED")
    assert found["subject"] == "decode-1 ring"
    # The largest of the prompts so far; a whole chunk would be 2 MiB.
    assert found["evidence"]["ring_bytes"] == 1 << 20
    assert 1 << 20 < found["evidence"]["largest_part_bytes"] <= 2 << 20
    assert "a staging_ring_mb of 2 or more" in found["remedy"]
    fleet.shows(found, "REFUSED", "decode-1")
    assert re.search(r"chunk_tokens of at most \d+ \(now 1024\)", found["remedy"])


def test_engines_that_disagree_on_a_prompt(demo: Start) -> None:
    fleet = demo("--fault", "plan-mismatch", "--transport", "loopback")
    fleet.said("expects 128 tokens, and the prefill side makes 144")
    found = fleet.diagnosed("KV_PLAN_MISMATCH")
    assert found["subject"] == "prefill"
    assert found["severity"] == "critical"
    assert "this side computed 9 pages, decode-0 expects 8" in found["evidence"]["latest"]
    fleet.shows(found, "KV_PLAN_MISMATCH", "this side computed 9 pages")


def test_a_room_that_waits_for_a_writer(begun: Begun) -> None:
    fleet = begun["stuck-room"]
    room = re.search(r"room (\d+): prefill-1 never", fleet.said("stuck-room:"))
    assert room is not None
    found = fleet.diagnosed("KV_ROOM_STUCK_TRANSFER")
    assert found["subject"].startswith("room ")
    assert "prefill-1" in found["cause"]
    fleet.shows(found, "prefill-1", found["subject"].removeprefix("room "))


def test_a_ring_that_is_pinned_by_a_stopped_writer(begun: Begun) -> None:
    fleet = begun["pinned-ring"]
    told = re.search(r"room (\d+): p1-prefill-0 \(pid \d+\) is stopped", fleet.said("pinned-ring:"))
    assert told is not None
    found = fleet.diagnosed("KV_RING_PINNED")
    assert re.fullmatch(r"decode-0 allocation \d+", found["subject"])
    assert (found["evidence"]["writer"], found["evidence"]["room"]) == ("p1-prefill-0", told[1])
    assert f"kvctl staging release decode-0:{found['subject'].rpartition(' ')[2]}" in found["remedy"]
    fleet.shows(found, "released|aside|region|lead")


def test_a_rank_that_was_set_up_with_another_page_size(demo: Start) -> None:
    fleet = demo("--fault", "compat", "--transport", "loopback")
    fleet.said("compat: decode-1 has pages of 24 tokens")
    found = fleet.diagnosed("KV_COMPAT_MISMATCH")
    assert found["subject"] == "decode-1"
    assert "page_size 16 (prefill-0) ≠ 24 (decode-1)" in found["evidence"]["differences"]
    fleet.shows(found, r"page_size\b.*16.*24", rc=1)  # which is what it says of two that do not fit


def test_a_rank_that_is_short_of_files(demo: Start) -> None:
    fleet = demo("--fault", "fd-low", "--transport", "loopback")
    limit = re.search(r"decode-1 \(pid \d+\) has \d+ files open and may have (\d+)", fleet.said("fd-low:"))
    assert limit is not None
    found = fleet.diagnosed("KV_FDS_LOW")
    assert found["subject"] == "decode-1"
    assert found["evidence"]["fds_limit"] == int(limit[1])
    fleet.shows(found)
    after = json.loads(fleet.kvctl("status", "-e", "decode-1", "-o", "json").stdout)["data"][0]["process"]
    assert after["fds_limit"] == 4 * int(limit[1])


def test_a_rank_that_was_drained_and_forgotten(demo: Start) -> None:
    fleet = demo("--fault", "draining", "--transport", "loopback")
    fleet.said("prefill-1 was drained, but its instance still gets rooms")
    found = fleet.diagnosed("KV_DRAINING")
    assert (found["subject"], found["severity"]) == ("prefill-1", "critical")
    assert "draining prefill-1 for" in fleet.kvctl("status", "-o", "table").stdout
    agents = json.loads(fleet.kvctl("agents", "-o", "json").stdout)["data"]
    assert {row["agent"]: row["state"] for row in agents if row["state"] != "ok"} == {"prefill-1": "draining"}
    fleet.shows(found, "prefill-1", "accepting")
    rows = json.loads(fleet.kvctl("doctor", "-o", "json").stdout)["data"]
    assert "KV_DRAINING" not in {row["code"] for row in rows}


def test_an_instance_of_which_a_rank_never_came(begun: Begun) -> None:
    fleet = begun["bootstrap"]
    fleet.said("p0-prefill-1 is not started")
    found = fleet.diagnosed("KV_ROOM_STUCK_BOOTSTRAP")
    assert "missing tp=1" in found["cause"]
    fleet.shows(found, "missing tp=1")


def test_a_writer_whose_requests_are_not_answered(begun: Begun) -> None:
    fleet = begun["grant-loss"]
    fleet.said("prefill-0 gets no staging grants any more")
    found = fleet.diagnosed("KV_GRANT_UNANSWERED")
    assert found["subject"] == "prefill-0 → decode-0"
    assert found["evidence"]["requests"] >= 5
    assert found["evidence"]["rooms"]
    fleet.shows(found, r"prefill-0\s+\d+\s+decode-0\b.*\bgrant\b")


def test_a_failure_that_the_other_side_never_hears_of(begun: Begun) -> None:
    fleet = begun["stuck-waiting"]
    fleet.said("prefill-0 has failed it, but decode-0 does not hear of it")
    found = fleet.diagnosed("KV_ROOM_STUCK_WAITING")
    assert re.fullmatch(r"room \d+", found["subject"])
    assert (found["evidence"]["state"], found["evidence"]["waits_for"]) == ("WaitingForInput", ["prefill-0"])
    assert "but prefill-0 failed it at +" in found["cause"]
    assert "ABORTED: the engine is out of memory" in found["cause"]
    fleet.shows(found, "the engine is out of memory", "prefill-0")


def test_parts_that_stay_in_the_ring(begun: Begun) -> None:
    fleet = begun["stuck-scatter"]
    fleet.said("decode-0 copies nothing from its ring")
    found = fleet.diagnosed("KV_ROOM_STUCK_SCATTER", of=r"room \d+")
    evidence = found["evidence"]
    assert evidence["decode"] == "decode-0"
    assert evidence["landed_cells"] == evidence["planned_cells"] > evidence["scattered_cells"]
    assert re.search(r"its control loop runs and has begun no copy of \d+ landed part", found["cause"])
    fleet.shows(found, r"decode-0\b.*\blanded\b")


def test_a_ring_that_gates_although_it_is_empty(begun: Begun) -> None:
    """Agents alone do not get here, so two things go wrong at once: a region that a writer still has is freed by
    force, while it only sleeps, and the line loses what would tell it so: watermarks, and that its room has failed."""
    fleet = begun["gated-empty"]
    fleet.said("the regions of decode-0's ring that prefill-0 waits for were force-released")
    found = fleet.diagnosed("KV_RING_GATED_EMPTY")
    assert found["subject"] == "decode-0 ring"
    assert found["evidence"]["gated_writers"] == ["prefill-0"]
    assert found["evidence"]["gated_parts"] > 0
    assert "kvctl record" in found["remedy"]
    fleet.shows(found, r"prefill-0\s+\d+\s+decode-0\b.*\bwatermark\b")
