"""Codes about rings: pinned, gated although empty, deadlocked, too small, quarantined."""

from __future__ import annotations

import pytest

from kvctl.client.faults import Fault, stopped, timed_out
from kvctl.health.finding import Severity
from tests.kvctl.health.fleets import MIB, Fleet, S


def paused_writer() -> Fleet:
    """prefill-1 is stopped and has the oldest grant of decode-0; parts of prefill-0 wait for it."""
    fleet = Fleet()
    fleet.gone("prefill-1")
    fleet.faults.append(Fault("prefill-1", "timeout", "no answer"))
    for name in ("decode-0", "decode-1"):
        fleet.peer(name, "prefill-1", state="suspect", last_heard_ns=40 * S)
        fleet.answers[name]["staging"]["ring"]["allocations"].clear()
    fleet.oldest("decode-0", 17, room="7", writer="prefill-1", age_ns=41 * S, offset=0, end=2 * MIB)
    for room in ("1002", "1005", "1009"):
        fleet.gated("prefill-0", "decode-0", room, age_ns=30 * S)
    fleet.room("decode-0", "7", state_age_ns=41 * S)
    fleet.room(
        "decode-0", "1002", state_age_ns=200 * S, missing=["prefill-0"], owed={"prefill-0": 32}
    )  # explained by it
    return fleet


def test_a_stopped_writer_pins_the_ring():
    fleet = paused_writer()
    (first, *others) = fleet.examine()
    assert (first.code, first.severity) == ("KV_RING_PINNED", Severity.CRITICAL)
    assert first.subject == "decode-0 allocation 17"
    assert first.agents == ("decode-0", "prefill-1")
    assert first.evidence["waiting_parts"] == 3
    assert first.evidence["waiting_writers"] == ["prefill-0"]
    assert "prefill-1 was granted 2 MiB of decode-0's ring 41 s ago for room 7" in first.cause
    assert "silent for 40 s" in first.cause
    assert "kvctl staging release decode-0:17" in first.remedy
    assert [(other.code, other.severity) for other in others] == [("KV_PEER_LOST", Severity.WARNING)]


def test_what_the_others_are_led_round_still_comes_first():
    fleet = paused_writer()
    fleet.allocation("decode-0", 17, aside=True)
    fleet.room("decode-0", "1002", state_age_ns=2 * S)
    for part in fleet.answers["prefill-0"]["staging"]["gated"]:
        part["age_ns"] = 0
    (first, second) = fleet.examine()
    assert (first.code, first.severity) == ("KV_RING_PINNED", Severity.WARNING)
    assert "later grants go around it" in first.cause
    assert second.code == "KV_PEER_LOST"


def test_a_stopped_writer_pins_the_ring_where_nobody_minds_silence():
    """With a long suspect_s the agent repeats its revoke request, and each request restarts the region's age."""
    fleet = paused_writer()
    fleet.setting("suspect_s", 500.0)
    for name in ("decode-0", "decode-1"):
        fleet.peer(name, "prefill-1", state="ready")
    fleet.allocation("decode-0", 17, state="revoking", age_ns=S // 2)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity) == (
        "KV_RING_PINNED",
        "decode-0 allocation 17",
        Severity.CRITICAL,
    )
    assert "does not answer the revoke request; it has been silent for 40 s" in found.cause
    assert found.since_ns == 40 * S


def test_a_write_that_never_ends_pins_the_ring():
    fleet = Fleet()
    fleet.oldest("decode-0", 17, room="7", age_ns=60 * S, posted=True, room_state="Failed")
    assert fleet.find("KV_RING_PINNED") == []  # nobody waits
    fleet.gated("prefill-1", "decode-0", "1002", age_ns=20 * S)
    (found,) = fleet.find("KV_RING_PINNED")
    assert "is still writing it" in found.cause
    assert "though the room is failed" in found.cause
    fleet.oldest("decode-0", 17, age_ns=9 * S)  # the agent's own ways have not had their time
    assert fleet.find("KV_RING_PINNED") == []


def test_an_empty_ring_gates_nobody():
    before = Fleet()
    ring = before.answers["decode-0"]["staging"]["ring"]
    ring.update(allocations=[], used_bytes=0)
    before.gated("prefill-1", "decode-0", "1002", age_ns=4 * S)
    fleet = before.copy()
    (found,) = fleet.find("KV_RING_GATED_EMPTY", before)
    assert (found.subject, found.severity) == ("decode-0 ring", Severity.CRITICAL)
    assert found.evidence["rooms"] == ["1002"]
    assert fleet.find("KV_RING_GATED_EMPTY") == []  # one moment proves nothing
    assert fleet.find("KV_RING_GATED_EMPTY", before, apart_s=0.5) == []
    fleet.answers["decode-0"]["staging"]["ring"]["granted_total"] += 1  # it has moved
    assert fleet.find("KV_RING_GATED_EMPTY", before) == []


def test_rooms_in_a_circle():
    """The part of room 5 waits for the unwritten region of room 6, whose forward waits for memory that room 5 holds."""
    fleet = Fleet()
    fleet.room("prefill-0", "6", state="WaitingForInput", state_age_ns=60 * S)
    fleet.oldest("decode-0", 17, room="6", writer="prefill-0", age_ns=50 * S, round=3, offset=0, end=2 * MIB)
    fleet.gated("prefill-0", "decode-0", "5", age_ns=40 * S)
    (first, *others) = fleet.examine()
    assert (first.code, first.subject) == ("KV_RING_CYCLE", "room 5")
    assert first.evidence["cycle"] == [
        "room 5 on prefill-0 waits behind room 6 of prefill-0 in decode-0's ring",
        "room 6 on prefill-0 waits for memory that room 5 holds there",
    ]
    assert "kvctl staging release decode-0:17" in first.remedy
    assert "KV_RING_PINNED" not in {finding.code for finding in others}
    fleet.room("prefill-0", "6", state="Transferring")  # its forward has begun: it waits for nobody
    assert fleet.find("KV_RING_CYCLE") == []


def test_parts_that_wait_in_turn_are_no_circle():
    fleet = Fleet()
    fleet.oldest("decode-0", 17, room="6", writer="prefill-1", age_ns=50 * S, offset=0, end=2 * MIB)
    fleet.gated("prefill-0", "decode-0", "5", age_ns=40 * S)
    fleet.gated("prefill-1", "decode-1", "8", age_ns=40 * S)
    assert fleet.find("KV_RING_CYCLE") == []


def test_what_a_lost_writer_may_still_write():
    fleet = Fleet()
    fleet.allocation("decode-0", 17, state="quarantined", writer="prefill-1", age_ns=30 * S, aside=True)
    fleet.metric("decode-0", "kvctl_quarantined_bytes", 3 * MIB)
    (found,) = fleet.find("KV_QUARANTINE")
    assert (found.subject, found.severity, found.weight) == ("decode-0", Severity.WARNING, 3 * MIB)
    assert found.agents == ("decode-0", "prefill-1")
    assert (found.evidence["ring_bytes"], found.evidence["quarantined_bytes"]) == (2 * MIB, 3 * MIB)
    assert "kvctl staging release decode-0:17" in found.remedy


def test_pages_that_a_lost_writer_may_still_write():
    fleet = Fleet()
    fleet.metric("decode-0", "kvctl_quarantined_bytes", MIB)
    fleet.room("decode-0", "7", state="Failed", missing=["prefill-1"])
    (found,) = fleet.find("KV_QUARANTINE", fleet)
    assert "kvctl staging release -e decode-0 --room 7" in found.remedy
    assert fleet.find("KV_QUARANTINE", Fleet()) == []  # it was not so a moment ago: it may drain yet


def test_a_quarantine_names_the_process_that_was_replaced() -> None:
    fleet = Fleet()
    fleet.metric("decode-0", "kvctl_quarantined_bytes", MIB)
    fleet.peer("decode-0", "prefill-1", former=["process 4242 on node-2 (000000000000beef)"])
    (found,) = fleet.find("KV_QUARANTINE", fleet)
    assert found.evidence["peers"] == ["prefill-1"]
    assert "prefill-1 may still write there" in found.cause
    assert found.cause.endswith("replaced, but not known to have ended: process 4242 on node-2 (000000000000beef)")


def test_a_ring_that_is_too_small():
    before, fleet = Fleet(), Fleet()
    for stage, seconds in {"gate": 150.0, "queue": 1.0, "gather": 0.5, "post": 0.2, "wire": 0.6}.items():
        fleet.spend("prefill-0", stage, seconds, 60)
    assert fleet.find("KV_RING_SMALL", before) == []  # nothing waits for a ring now
    for _ in range(8):
        fleet.gated("prefill-0", "decode-0", "1002", bytes=4 * MIB)
    assert fleet.find("KV_RING_SMALL", before) == []  # for a short while only
    (found,) = fleet.find("KV_RING_SMALL", before, apart_s=12)
    assert (found.subject, found.severity) == ("decode-0 ring", Severity.WARNING)
    assert found.evidence["needed_ring_mb"] == 64 + 32
    assert found.evidence["gate_ratio"] > 0.9
    assert "a staging_ring_mb of 96 or more" in found.remedy
    assert fleet.find("KV_READY_GAP", before, apart_s=12) == []  # which explains it


def test_a_part_that_no_ring_holds():
    fleet = Fleet()
    fleet.answers["decode-0"]["staging"]["ring"].update(refused_total=4, refused_largest_bytes=96 * MIB)
    (found,) = fleet.find("KV_CHUNK_OVERSIZED")
    assert (found.subject, found.severity, found.weight) == ("decode-0 ring", Severity.WARNING, 4)
    assert "needs 96 MiB, decode-0's ring has 64 MiB" in found.cause
    assert "a staging_ring_mb of 96 or more" in found.remedy
    assert "chunk_tokens of at most 5461 (now 8192)" in found.remedy
    fleet.answers["decode-0"]["staging"]["ring"]["refused_largest_bytes"] = (
        2 * MIB
    )  # a quarantined region was in its way
    assert fleet.find("KV_CHUNK_OVERSIZED") == []


def test_a_request_that_nobody_answers():
    fleet = Fleet()
    fleet.gated("prefill-0", "decode-1", "1002", waiting_for="grant", requests=12, asked_age_ns=13 * S)
    (found,) = fleet.find("KV_GRANT_UNANSWERED")
    assert (found.subject, found.severity) == ("prefill-0 → decode-1", Severity.CRITICAL)
    assert found.agents == ("decode-1", "prefill-0")
    assert (found.evidence["requests"], found.evidence["asked_age_ns"]) == (12, 13 * S)
    fleet.peer("prefill-0", "decode-1", state="suspect", last_heard_ns=5 * S)  # which explains it
    assert fleet.find("KV_GRANT_UNANSWERED") == []


def test_one_writer_that_nobody_answers_is_one_finding():
    fleet = Fleet()
    for peer, room in (("decode-0", "1001"), ("decode-1", "1002"), ("decode-1", "1005")):
        fleet.gated("prefill-0", peer, room, waiting_for="grant", requests=12, asked_age_ns=13 * S)
        # It waits for the same thing, and is no finding of its own.
        fleet.room(peer, room, state_age_ns=200 * S, owed={"prefill-0": 32}, peers=["prefill-0", "prefill-1"])
    (found,) = fleet.examine()
    assert (found.code, found.subject) == ("KV_GRANT_UNANSWERED", "prefill-0")
    assert found.agents == ("prefill-0", "decode-0", "decode-1")
    assert found.cause == (
        "prefill-0 asked decode-0 and decode-1 for staging of 3 rooms and got neither grant nor refusal: 12 requests "
        "in 13 s for room 1001; 3 parts wait"
    )
    assert found.remedy.startswith("`kvctl staging -e prefill-0`")


def test_a_decode_rank_that_answers_nobody_is_one_finding():
    fleet = Fleet()
    for writer in ("prefill-0", "prefill-1"):
        fleet.gated(writer, "decode-1", "1002", waiting_for="grant", requests=12, asked_age_ns=13 * S)
    (found,) = fleet.find("KV_GRANT_UNANSWERED")
    assert (found.subject, found.agents) == ("decode-1", ("decode-1", "prefill-0", "prefill-1"))


def test_a_request_whose_turn_has_not_come_is_not_unanswered():
    fleet = Fleet()
    fleet.gated("prefill-0", "decode-1", "1002", waiting_for="grant", requests=0, asked_age_ns=None, age_ns=60 * S)
    assert fleet.find("KV_GRANT_UNANSWERED") == []


@pytest.mark.parametrize(
    ("fault", "resume"),
    [
        (stopped("prefill-0", "its process", 4242), "or end it: `kill -CONT 4242` lets it go on"),
        (timed_out("prefill-0", 2 * S, local=True), "or end it: `kvctl agents --timeout 10s` waits longer"),
        (None, "or end it: `kvctl stacks -e prefill-0` shows what its threads do"),
    ],
)
def test_stacks_are_asked_only_of_a_writer_that_answers(fault: Fault | None, resume: str) -> None:
    fleet = Fleet()
    fleet.oldest("decode-0", 7, age_ns=60 * S, writer="prefill-0", offset=0, end=2 * MIB)
    fleet.peer("decode-0", "prefill-0", state="suspect", last_heard_ns=60 * S)
    fleet.gated("prefill-1", "decode-0", "1002", age_ns=60 * S)
    if fault is not None:
        fleet.gone("prefill-0")
        fleet.faults.append(fault)
    (found,) = fleet.find("KV_RING_PINNED")
    assert resume in found.remedy
    assert "; 1 part of prefill-1 waits for this region" in found.cause
