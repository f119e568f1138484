"""Codes about peers: silent, lost, reconnected, stale, with another clock."""

from __future__ import annotations

import pytest

from kvctl.client.clock import ClockOffset
from kvctl.client.faults import stopped, timed_out
from kvctl.health.finding import Severity
from tests.kvctl.health.fleets import MS, Fleet, S

DEAD = "peer prefill-1 (incarnation 00000000000003a1) lost: process 4243 has ended"


def killed(name: str = "prefill-1") -> Fleet:
    fleet = Fleet()
    fleet.gone(name)
    fleet.stale.append(name)
    error = DEAD.replace("prefill-1", name)
    for other in fleet.answers:
        if any(row["peer"] == name for row in fleet.answers[other]["peers"]):
            fleet.peer(other, name, state="lost", last_heard_ns=41 * S, last_error=error, rooms=3)
    return fleet


def test_a_dead_prefill_rank_is_one_finding_and_comes_first():
    fleet = killed()
    fleet.room("decode-0", "7", state="Bootstrapping", state_age_ns=40 * S, missing=["prefill-1"])
    fleet.room("decode-0", "8", state_age_ns=200 * S)
    fleet.failed(["decode-0", "prefill-0"], "9", "KV_PEER_LOST", "decode-0", DEAD)
    (first, *others) = fleet.examine()
    assert (first.code, first.subject, first.severity) == ("KV_PEER_LOST", "prefill-1", Severity.CRITICAL)
    assert not others  # its rooms are explained by it
    assert first.agents == ("prefill-1", "decode-0", "decode-1")
    assert first.evidence["missed_by"] == ["decode-0", "decode-1"]
    assert first.evidence["failed_rooms"] == 1
    assert first.since_ns == 41 * S
    assert "process 4243 has ended" in first.cause
    assert "cannot open a room" in first.cause
    assert "start prefill-1 again" in first.remedy


def test_a_dead_decode_rank_is_forgotten_in_time():
    fleet = killed("decode-1")
    assert fleet.find("KV_PEER_LOST")[0].severity is Severity.CRITICAL
    for name in ("prefill-0", "prefill-1"):
        fleet.peer(name, "decode-1", last_heard_ns=1200 * S)
    assert fleet.find("KV_PEER_LOST")[0].severity is Severity.WARNING


def test_a_decode_rank_that_said_goodbye_is_missed_by_nobody():
    fleet = killed("decode-1")
    for name in ("prefill-0", "prefill-1"):
        fleet.peer(name, "decode-1", last_error="peer decode-1 (incarnation 0f) lost: it was closed")
    assert fleet.find("KV_PEER_LOST") == []


def test_a_decode_rank_whose_place_another_has_taken_is_missed_by_nobody():
    fleet = killed("decode-1")
    for name in ("prefill-0", "prefill-1"):
        fleet.peer(name, "decode-1", needed=False)
    assert fleet.find("KV_PEER_LOST") == []


def test_a_prefill_rank_that_is_remembered_for_its_memory_is_no_reason_why_rooms_fail():
    fleet = killed()
    for name in ("decode-0", "decode-1"):
        fleet.peer(name, "prefill-1", needed=False)
    (found,) = fleet.find("KV_PEER_LOST")
    assert found.severity is Severity.WARNING
    assert "no room needs it" in found.cause
    assert "`kvctl peers forget prefill-1 --force`" in found.remedy


def test_a_prefill_rank_that_said_goodbye_is_missed_by_its_instance():
    fleet = killed()
    for name in ("decode-0", "decode-1"):
        fleet.peer(name, "prefill-1", last_error="peer prefill-1 (incarnation 0f) lost: it was closed")
    (found,) = fleet.find("KV_PEER_LOST")
    assert found.severity is Severity.WARNING
    assert "was closed" in found.cause


def test_silence_is_a_warning_from_three_seconds_on():
    fleet = Fleet()
    fleet.setting("suspect_s", 0.5)
    fleet.peer("decode-0", "prefill-1", state="suspect", last_heard_ns=2900 * MS)
    assert fleet.find("KV_PEER_LOST") == []
    fleet.peer("decode-0", "prefill-1", last_heard_ns=3100 * MS)
    (found,) = fleet.find("KV_PEER_LOST")
    assert (found.severity, found.evidence["state"]) == (Severity.WARNING, "suspect")


def test_a_stopped_process_is_told_from_a_cut_network():
    fleet = Fleet()
    fleet.peer("decode-0", "prefill-1", state="suspect", last_heard_ns=9 * S)
    (cut,) = fleet.find("KV_PEER_LOST")
    assert "but it answers kvctl" in cut.cause
    fleet.gone("prefill-1")
    fleet.faults.append(stopped("prefill-1", "its process", 4243))
    (found,) = fleet.find("KV_PEER_LOST")
    assert found.cause.startswith("decode-0 heard nothing from prefill-1 for 9 s: its process 4243 is stopped")
    assert found.remedy == "`kill -CONT 4243` lets it go on"


@pytest.mark.parametrize("local", [True, False])
def test_an_agent_that_does_not_answer_in_time_is_not_called_hung(local: bool) -> None:
    fleet = Fleet()
    fleet.peer("decode-0", "prefill-1", state="suspect", last_heard_ns=9 * S)
    fleet.gone("prefill-1")
    fleet.faults.append(timed_out("prefill-1", 2 * S, local=local))
    (found,) = fleet.find("KV_PEER_LOST")
    means = "busy or hung" if local else "busy, stopped, hung or cut off"
    assert f"and kvctl cannot ask it: no answer within 2 s: {means}" in found.cause
    assert found.remedy.startswith("`kvctl agents --timeout 10s` waits longer, kvctl doctor")


def test_rooms_that_failed_while_it_was_away():
    fleet = Fleet()
    for room in ("7", "8"):
        fleet.failed(["decode-0", "prefill-0"], room, "KV_PEER_LOST", "decode-0", DEAD)
    (found,) = fleet.find("KV_PEER_LOST")
    assert (found.subject, found.severity, found.weight) == ("prefill-1", Severity.WARNING, 2)
    assert "it is connected again" in found.cause
    for name in ("decode-0", "decode-1"):
        fleet.peer(name, "prefill-1", incarnation="deadbeef", state="lost")
    assert "it is started again, and not connected yet" in fleet.find("KV_PEER_LOST")[0].cause
    for name in ("decode-0", "decode-1"):
        peers = fleet.answers[name]["peers"]
        peers[:] = [row for row in peers if row["peer"] != "prefill-1"]
    assert "it is not needed any more, and forgotten" in fleet.find("KV_PEER_LOST")[0].cause
    fleet.hellos["decode-0"]["now_ns"] += 601 * S
    fleet.hellos["prefill-0"]["now_ns"] += 601 * S
    assert fleet.find("KV_PEER_LOST") == []


def test_a_life_that_is_over():
    fleet = Fleet()
    fleet.peer("decode-0", "prefill-1", incarnation="00000000deadbeef", state="lost", last_heard_ns=500 * S)
    (first, *_) = fleet.examine()
    assert (first.code, first.subject) == ("KV_PEER_STALE", "decode-0 → prefill-1")
    assert first.evidence["incarnation_known"] == "00000000deadbeef"
    assert fleet.find("KV_PEER_LOST") == []
    fleet.status("prefill-1", uptime_ns=8 * S)  # they may not have met yet
    assert fleet.find("KV_PEER_STALE") == []


def test_a_decode_rank_that_was_started_again_and_has_no_request_yet_is_neither_lost_nor_stale():
    fleet = Fleet()
    lost = "peer decode-1 (incarnation deadbeef) lost: process 4243 has ended"
    for name in ("prefill-0", "prefill-1"):
        fleet.peer(name, "decode-1", incarnation="deadbeef", state="lost", last_heard_ns=50 * S, last_error=lost)
    fleet.answers["decode-1"]["peers"].clear()  # its engine names the prefill instance with the first request
    assert fleet.examine() == []


def test_a_prefill_rank_that_was_started_again_need_not_be_started():
    fleet = killed()
    for name in ("decode-0", "decode-1"):
        fleet.peer(name, "prefill-1", incarnation="deadbeef")
    (gone,) = fleet.find("KV_PEER_LOST")
    assert "start prefill-1 again" in gone.remedy
    again = Fleet()
    again.status("prefill-1", uptime_ns=3 * S)
    for name in ("decode-0", "decode-1"):
        again.peer(name, "prefill-1", incarnation="deadbeef", state="lost", last_heard_ns=20 * S, last_error=DEAD)
    assert again.examine() == []


def test_a_peer_that_does_not_read():
    before, fleet = Fleet(), Fleet()
    fleet.peer("decode-0", "prefill-1", control_queue=900)
    assert fleet.find("KV_PEER_BLOCKING", before) == []  # of this moment only
    (found,) = fleet.find("KV_PEER_BLOCKING", fleet)
    assert (found.subject, found.evidence["control_queue"]) == ("decode-0 → prefill-1", 900)
    fleet.peer("decode-0", "prefill-1", state="lost")
    assert fleet.find("KV_PEER_BLOCKING", fleet) == []  # which explains it


def test_a_watermark_that_is_not_seen():
    before = Fleet()
    before.peer("decode-0", "prefill-1", watermark_sent=[5, 0, 41])
    fleet = before.copy()
    fleet.gated("prefill-1", "decode-0", "1002")
    assert fleet.find("KV_SUBSCRIBER_DEAD", before, apart_s=4) == []
    (found,) = fleet.find("KV_SUBSCRIBER_DEAD", before, apart_s=6)
    assert (found.subject, found.severity) == ("prefill-1 → decode-0", Severity.CRITICAL)
    assert found.evidence["watermark_seen"] == [4, 0, 40]
    fleet.peer("prefill-1", "decode-0", watermark_seen=[5, 0, 41])
    assert fleet.find("KV_SUBSCRIBER_DEAD", before, apart_s=6) == []


def test_a_clock_that_is_off():
    fleet = Fleet()
    fleet.clocks["decode-1"] = ClockOffset(80 * MS, 1 * MS)
    (found,) = fleet.find("KV_CLOCK_SKEW")
    assert (found.subject.partition(" ")[0], found.agents, found.severity) == ("decode-1", ("decode-1",), Severity.INFO)
    assert found.evidence["bound_ns"] == found.evidence["offset_ns"] - found.evidence["error_ns"]
    assert 70 * MS < found.evidence["bound_ns"] < 80 * MS
    fleet.clocks["decode-1"] = ClockOffset(-90 * S, 1 * MS)
    (found,) = fleet.find("KV_CLOCK_SKEW")
    assert found.severity is Severity.WARNING
    assert "behind" in found.cause


def test_failures_are_told_of_however_many_rooms_succeeded_since():
    """Successful rooms displace failed ones in `history` but not in `failed`; counts of them are not totals."""
    fleet = Fleet()
    fleet.failed(["decode-0", "prefill-0"], "9", "KV_PEER_LOST", "decode-0", DEAD)
    (known,) = fleet.find("KV_PEER_LOST")
    for name in fleet.answers:
        fleet.answers[name]["history"] = []
    (found,) = fleet.find("KV_PEER_LOST")
    assert found.evidence["failed_rooms"] == known.evidence["failed_rooms"] == 1
    assert not [name for name in found.evidence if name.endswith("_total")]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("KV_PEER_LOST", DEAD),
        ("KV_ROOM_STUCK_BOOTSTRAP", "room 7 was stuck in Bootstrapping for 60.0 s: not accepted by prefill-1"),
        ("KV_ROOM_STUCK_TRANSFER", "room 7 was stuck in Transferring for 60.0 s: 32 cells of prefill-1 never landed"),
        ("KV_TRANSPORT", "a write to prefill-1 failed"),
        ("KV_PEER_LOST", "Could not fetch prefill parallel info from 10.0.0.5:8998"),
    ],
)
def test_all_rooms_that_a_lost_agent_caused_to_fail_are_counted(code: str, text: str) -> None:
    fleet = killed()
    for number in range(32):
        fleet.failed(["decode-0"], str(number), code, "decode-0", text, ago_s=number)
    (found,) = fleet.examine()
    assert (found.code, found.subject) == ("KV_PEER_LOST", "prefill-1")
    assert found.evidence["failed_rooms"] == 32


def test_rooms_that_a_lost_peer_without_a_name_caused_to_fail_are_reported() -> None:
    fleet, text = Fleet(), "Could not fetch prefill parallel info from 10.0.0.5:8998"
    for number in range(32):
        fleet.failed(["decode-0"], str(number), "KV_PEER_LOST", "decode-0", text, ago_s=number)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity) == ("KV_PEER_LOST", "decode-0", Severity.WARNING)
    assert (found.evidence["failed_rooms"], found.since_ns) == (32, 31 * S)
    fleet.status("decode-0", last_success_age_ns=32 * S)
    (found,) = fleet.examine()
    assert found.severity is Severity.CRITICAL
    assert found.cause.endswith("; no room has succeeded since the first of them")


def test_a_closed_agent_without_which_every_room_fails_is_critical() -> None:
    fleet = Fleet()
    fleet.gone("prefill-1")
    error = "peer prefill-1 (incarnation 00000000000003a1) lost: it was closed"
    for name in ("decode-0", "decode-1"):
        fleet.peer(name, "prefill-1", state="lost", last_heard_ns=41 * S, last_error=error)
    (found,) = fleet.find("KV_PEER_LOST")
    assert found.severity is Severity.WARNING
    for number in range(8):
        fleet.failed(["decode-0"], str(number), "KV_PEER_LOST", "decode-0", error)
    fleet.status("decode-0", last_success_age_ns=None)
    (found,) = fleet.find("KV_PEER_LOST")
    assert found.severity is Severity.CRITICAL
    assert "8 rooms failed, and none has succeeded since" in found.cause
