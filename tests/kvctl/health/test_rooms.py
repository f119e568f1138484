"""Codes about rooms that make no progress or have failed."""

from __future__ import annotations

import pytest

from kvctl.health.finding import Severity
from kvctl_agent.contract.states import UNREGISTERED
from tests.kvctl.health.fleets import MS, NOW, Fleet, S


def left_behind() -> Fleet:
    """prefill-0 computed and sent its share of room 7; the forward of prefill-1 does not end."""
    fleet = Fleet()
    fleet.room("decode-0", "7", state_age_ns=30 * S, opened_at_ns=NOW - 31 * S)
    fleet.room("prefill-0", "7", forward_done_at_ns=NOW - 29 * S, coverage={"sent": 32})
    fleet.room("prefill-1", "7")
    return fleet


def test_a_rank_that_was_left_behind():
    fleet = left_behind()
    (first, *others) = fleet.examine()
    assert (first.code, first.subject, first.severity) == ("KV_ROOM_STUCK_TRANSFER", "room 7", Severity.CRITICAL)
    assert not others
    assert first.agents == ("prefill-1", "decode-0")
    assert first.evidence["owed_cells"] == {"prefill-1": 32}
    assert first.since_ns == 30 * S
    assert "prefill-1 has sent 0 of 32 cells and its forward has not ended, though prefill-0 computed" in first.cause
    assert "kvctl rooms abort 7" in first.remedy


def test_rooms_with_one_culprit_are_one_finding():
    fleet = left_behind()
    for room in ("8", "9"):
        fleet.room("decode-0", room, state_age_ns=20 * S)
        fleet.room("prefill-0", room, forward_done_at_ns=NOW - 19 * S, coverage={"sent": 32})
        fleet.room("prefill-1", room)
    (found,) = fleet.find("KV_ROOM_STUCK_TRANSFER")
    assert (found.subject, found.weight) == ("room 7", 3)
    assert "2 more rooms with it" in found.cause


def test_a_long_prompt_is_not_left_behind():
    """Both ranks compute; one has just ended its forward."""
    fleet = left_behind()
    fleet.room("prefill-0", "7", forward_done_at_ns=NOW - 2 * S)
    assert fleet.examine() == []


def test_a_fleet_that_is_slow_as_a_whole_has_more_patience():
    fleet = left_behind()
    fleet.status("decode-0", latency={"p99_ns": 12 * S, "count": 100})
    assert fleet.examine() == []


def test_one_slow_room_at_the_start_does_not_hide_those_that_are_stuck():
    """With 22 rooms, p99 is the slowest one, which waited while lanes were measured."""
    fleet = left_behind()
    fleet.room("decode-0", "7", state_age_ns=15 * S)
    fleet.room("prefill-0", "7", forward_done_at_ns=NOW - 14 * S)
    fleet.status("decode-0", latency={"p99_ns": 4 * S, "count": 22})
    assert [one.code for one in fleet.examine()] == ["KV_ROOM_STUCK_TRANSFER"]


def test_however_slow_a_fleet_is_there_is_time_left_before_the_deadline():
    fleet = left_behind()
    fleet.setting("waiting_timeout_s", 60.0)
    fleet.room("decode-0", "7", state_age_ns=16 * S)
    fleet.room("prefill-0", "7", forward_done_at_ns=NOW - 14 * S)
    fleet.status("decode-0", latency={"p99_ns": 12 * S, "count": 22})
    assert fleet.examine() == []
    fleet.room("prefill-0", "7", forward_done_at_ns=NOW - 15 * S)
    assert [one.code for one in fleet.examine()] == ["KV_ROOM_STUCK_TRANSFER"]


def test_a_part_that_was_computed_and_never_sent():
    fleet = left_behind()
    fleet.room("prefill-1", "7", forward_done_at_ns=NOW - 28 * S, coverage={"sent": 8})
    (found,) = fleet.find("KV_ROOM_STUCK_TRANSFER")
    assert "computed it 28 s ago and has sent 8 of 32 cells" in found.cause
    fleet.room("prefill-1", "7", parked=2)  # it waits for the ring, which has codes of its own
    assert fleet.find("KV_ROOM_STUCK_TRANSFER") == []


def test_a_part_that_was_sent_and_never_landed():
    fleet = left_behind()
    fleet.room("prefill-1", "7", forward_done_at_ns=NOW - 28 * S, coverage={"sent": 32})
    (found,) = fleet.find("KV_ROOM_STUCK_TRANSFER")
    assert "prefill-1 sent all 32 cells, which never landed" in found.cause


def test_a_room_that_the_other_end_has_failed():
    fleet = Fleet()
    fleet.room("decode-0", "7", state="WaitingForInput", state_age_ns=30 * S, opened_at_ns=NOW - 31 * S)
    fleet.room("prefill-0", "7")
    fleet.failed(["prefill-1"], "7", "KV_TRANSPORT", "prefill-1", "NIXL_ERR_BACKEND", ago_s=29)
    found, *_ = fleet.find("KV_ROOM_STUCK_WAITING")
    assert found.severity is Severity.CRITICAL
    assert "prefill-1 failed it at +2 s: KV_TRANSPORT: NIXL_ERR_BACKEND" in found.cause


def test_a_room_that_the_other_end_does_not_know():
    fleet = Fleet()
    fleet.room("decode-0", "7", state="WaitingForInput", state_age_ns=30 * S)
    fleet.room("prefill-0", "7")
    found, *_ = fleet.find("KV_ROOM_STUCK_WAITING")
    assert "prefill-1 does not know the room" in found.cause


def test_waiting_alone_is_queueing():
    fleet = Fleet()
    for name in ("decode-0", "prefill-0", "prefill-1"):
        fleet.room(name, "7", state="WaitingForInput", state_age_ns=140 * S, opened_at_ns=NOW - 141 * S)
    assert fleet.examine() == []
    fleet.room("decode-0", "7", state_age_ns=151 * S)
    (found,) = fleet.examine()
    assert (found.code, found.severity) == ("KV_ROOM_STUCK_WAITING", Severity.WARNING)
    assert "half of waiting_timeout_s (300 s) is over" in found.cause


def test_everything_landed_and_is_not_in_its_pages():
    fleet = Fleet()
    fleet.room("decode-0", "7", state_age_ns=30 * S, coverage={"landed": 64, "scattered": 60}, owed={}, missing=[])
    assert fleet.find("KV_ROOM_STUCK_SCATTER") == []  # it may have landed just now
    fleet.allocation("decode-0", 41, room="7", state="landed", age_ns=25 * S)
    (found,) = fleet.find("KV_ROOM_STUCK_SCATTER")
    assert (found.subject, found.severity) == ("room 7", Severity.CRITICAL)
    assert "4 of 64 cells are not in their pages, the oldest of them for 25 s" in found.cause


@pytest.mark.parametrize(
    ("copies", "reason"),
    [
        (
            {"waiting": 3, "copying_age_ns": 24 * S, "turn_age_ns": 24 * S},
            "one copy has been running for 24 s, with 3 landed parts not copied",
        ),
        (
            {"waiting": 3, "copying_age_ns": None, "turn_age_ns": 24 * S},
            "its control loop has not looked for work for 24 s, with 3 landed parts not copied",
        ),
        (
            {"waiting": 1, "copying_age_ns": None, "turn_age_ns": 2 * MS},
            "its control loop runs and has begun no copy of 1 landed part",
        ),
    ],
)
def test_why_what_has_landed_is_not_copied(copies, reason):
    fleet = Fleet()
    fleet.room("decode-0", "7", state_age_ns=40 * S, coverage={"landed": 64, "scattered": 60}, owed={}, missing=[])
    fleet.allocation("decode-0", 41, room="7", state="landed", age_ns=25 * S)
    fleet.answers["decode-0"]["staging"]["ring"]["copies"] = copies
    (found,) = fleet.find("KV_ROOM_STUCK_SCATTER")
    assert reason in found.cause
    assert found.remedy.startswith("`kvctl staging map -e decode-0`")


def test_a_rank_that_does_not_accept():
    fleet = Fleet()
    fleet.room("decode-0", "7", state="Bootstrapping", state_age_ns=12 * S, missing=["prefill-1"])
    (found,) = fleet.find("KV_ROOM_STUCK_BOOTSTRAP")
    assert found.severity is Severity.CRITICAL
    assert found.agents == ("prefill-1", "decode-0")
    assert "prefill-1 has neither accepted nor refused it" in found.cause


def test_an_instance_that_is_not_complete():
    waits = "6 of 8 prefill ranks registered, missing tp=2,3"
    fleet = Fleet()
    fleet.status("decode-0", waiting_for=waits)
    fleet.room("decode-0", "7", state="Bootstrapping", state_age_ns=12 * S, missing=[])
    (found,) = fleet.examine()
    assert (found.code, found.subject) == ("KV_ROOM_STUCK_BOOTSTRAP", "room 7")
    assert waits in found.cause
    assert found.severity is Severity.WARNING
    assert found.remedy.startswith("`kvctl bootstrap`")


def test_rooms_that_ran_into_the_deadline_of_both_ends_before_the_instance_was_complete():
    """The prefill rank gave up first and knows no decode rank; the decode rank's report has the reason."""
    waits = "1 of 2 prefill ranks registered, missing tp=1"
    fleet = Fleet()
    stuck = "room 6 was stuck in Bootstrapping for 60.1 s"
    unopened = f"{stuck}: 0 of ? decode ranks opened it"
    fleet.failed(["prefill-0"], "6", "KV_ROOM_STUCK_BOOTSTRAP", "prefill-0", unopened, ago_s=19)
    fleet.failed(["decode-0"], "6", "KV_ROOM_STUCK_BOOTSTRAP", "decode-0", f"{stuck}: {waits}")
    (found,) = fleet.examine()
    assert found.agents[0] == "decode-0"
    assert waits in found.cause
    fleet.status("decode-0", waiting_for=waits)
    fleet.room("decode-0", "7", state="Bootstrapping", state_age_ns=12 * S, missing=[])
    (found,) = fleet.examine()
    assert (found.subject, found.evidence["failed_rooms"]) == ("room 7", 1)
    assert waits in found.cause


def test_an_instance_that_never_answered_is_no_stuck_room():
    """A decode rank with two instances: the first never started, every room of the second is done."""
    fleet = Fleet()
    waits = "no answer from the registry at tcp://10.0.0.1:7000"
    for name in ("decode-0", "decode-1"):
        fleet.status(name, waiting_for=waits)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity) == ("KV_NOT_READY", "decode-0", Severity.WARNING)
    assert found.cause == (
        f"decode-0 and decode-1 wait, 10m00s after the start: {waits}; rooms that do not need it are served "
        "(2408 rooms done)"
    )
    for name in ("decode-0", "decode-1"):
        fleet.status(name, not_ready=waits)
    (found,) = fleet.examine()
    assert found.cause == f"decode-0 and decode-1 cannot serve, 10m00s after the start: {waits}"
    for name in ("decode-0", "decode-1"):
        fleet.status(name, uptime_ns=20 * S)
    assert fleet.examine() == []  # the others are on their way


def test_an_engine_in_sleep_mode_is_no_finding():
    fleet = Fleet()
    fleet.status("decode-0", waiting_for=UNREGISTERED, accepting=False)
    assert fleet.examine() == []


def test_an_agent_that_is_not_ready_has_no_instance_that_serves():
    """It served rooms until its only instance was lost; one that is ready serves rooms of the others."""
    fleet, waits = Fleet(), "no answer from the registry at tcp://10.0.0.1:7000"
    fleet.status("decode-0", waiting_for=waits, not_ready=waits)
    fleet.status("decode-1", waiting_for=waits, rooms_finished_total={"Success": 0, "Failed": 0})
    causes = [found.cause for found in fleet.examine()]
    assert f"decode-0 cannot serve, 10m00s after the start: {waits}" in causes
    assert (
        f"decode-1 waits, 10m00s after the start: {waits}; rooms that do not need it are served (0 rooms done)"
        in causes
    )


def test_a_room_that_nobody_opens():
    fleet = Fleet()
    fleet.room("prefill-0", "7", state="Bootstrapping", state_age_ns=140 * S, peers=[])
    assert fleet.examine() == []
    fleet.room("prefill-0", "7", state_age_ns=151 * S)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity) == ("KV_ROOM_STUCK_BOOTSTRAP", "prefill-0", Severity.WARNING)


@pytest.mark.parametrize("kind", ["BOOTSTRAP", "WAITING", "TRANSFER", "SCATTER"])
def test_rooms_that_ran_into_their_deadline(kind):
    fleet, code = Fleet(), f"KV_ROOM_STUCK_{kind}"
    text = "room 7 was stuck in Transferring for 300.0 s: 32 cells of prefill-1 never landed"
    fleet.failed(["decode-0", "prefill-0"], "7", code, "decode-0", text)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity) == (code, "room 7", Severity.WARNING)
    assert found.evidence["failed_rooms"] == 1
    assert found.agents[0] == "prefill-1"
    assert text in found.cause


def over_at_all_ends(fleet: Fleet, room: str, ago_s: float = 20) -> None:
    """prefill-1 never computed its half: each end gave the room up before it heard from the others."""
    stuck = f"room {room} was stuck in Transferring for 60.0 s"
    said = {
        "prefill-0": f"{stuck}: no RoomDone from decode-0",
        "decode-0": f"{stuck}: chunk 2 layers 0-3 of prefill-1 did not arrive",
        "prefill-1": f"{stuck}: the engine gave no last pages: all layers have 32, and none with last=True",
    }
    for name, text in said.items():
        fleet.failed([name], room, "KV_ROOM_STUCK_TRANSFER", name, text, ago_s)


def test_a_room_that_each_end_gave_up_is_one_finding_about_who_did_not_send():
    fleet = Fleet()
    over_at_all_ends(fleet, "7")
    (found,) = fleet.examine()
    assert (found.subject, found.weight, found.evidence["rooms"]) == ("room 7", 1, ["7"])
    assert found.agents[0] == "prefill-1"
    assert set(found.agents) == {"prefill-0", "prefill-1", "decode-0"}
    assert "the engine gave no last pages" in found.cause
    over_at_all_ends(fleet, "8", ago_s=5)
    (found,) = fleet.examine()
    assert (found.subject, found.weight, found.evidence["rooms"]) == ("prefill-1", 2, ["8", "7"])


def test_rooms_that_wait_now_and_rooms_that_have_waited_for_one_culprit_are_one_finding():
    fleet = left_behind()
    (alone,) = fleet.examine()
    over_at_all_ends(fleet, "6", ago_s=40)
    (found,) = fleet.examine()
    assert (found.subject, found.severity, found.weight) == (alone.subject, alone.severity, alone.weight)
    assert found.evidence["failed_rooms"] == 1
    assert found.cause == f"{alone.cause}; 1 room before it reached the deadline, last 40 s ago"


def test_a_room_that_one_end_has_given_up_and_another_waits_for_is_told_once():
    fleet = left_behind()
    text = "room 7 was stuck in Transferring for 60.0 s: no RoomDone from decode-0"
    fleet.failed(["prefill-0"], "7", "KV_ROOM_STUCK_TRANSFER", "prefill-0", text, ago_s=1)
    (found,) = fleet.find("KV_ROOM_STUCK_TRANSFER")
    assert (found.subject, found.severity) == ("room 7", Severity.CRITICAL)


def test_a_room_number_that_is_in_use():
    fleet = Fleet()
    text = "room 7 is active for decode-0 with nonce 00000000000000ff"
    fleet.failed(["decode-1", "prefill-0"], "7", "KV_ROOM_DUPLICATE", "prefill-0", text)
    (found,) = fleet.examine()
    assert (found.code, found.subject) == ("KV_ROOM_DUPLICATE", "room 7")
    assert (found.evidence["active_for"], found.evidence["asked_by"]) == (["decode-0"], ["decode-1"])
    assert "opened by decode-1 while it was active for decode-0" in found.cause


def test_a_dead_registry_is_one_finding_that_is_critical_once_no_room_succeeds() -> None:
    fleet, text = Fleet(), "the prefill instance at tcp://10.0.0.5:8998: no answer from its registry"
    for number, rank in enumerate(("decode-0", "decode-1", "decode-0", "decode-1")):
        stuck = f"room {number} was stuck in Bootstrapping for 60.0 s: {text}"
        fleet.failed([rank], str(number), "KV_ROOM_STUCK_BOOTSTRAP", rank, stuck, ago_s=10 + number)
    (found,) = fleet.examine()
    assert (found.subject, found.severity, found.weight) == ("decode", Severity.WARNING, 4)
    assert found.since_ns == 13 * S
    assert set(found.agents) == {"decode-0", "decode-1"}
    for name in ("decode-0", "decode-1"):
        fleet.status(name, last_success_age_ns=20 * S)
    (found,) = fleet.examine()
    assert found.severity is Severity.CRITICAL
    fleet.status("decode-0", last_success_age_ns=2 * S)
    assert fleet.examine()[0].severity is Severity.WARNING


def test_rooms_of_an_instance_that_wait_for_a_dead_registry_are_one_finding() -> None:
    fleet = Fleet()
    for number, name in (("7", "decode-0"), ("8", "decode-1")):
        fleet.room(name, number, state="Bootstrapping", state_age_ns=100 * S, missing=[], peers=[])
        fleet.status(name, waiting_for="no answer from the registry at tcp://10.0.0.5:8998")
    (found,) = fleet.find("KV_ROOM_STUCK_BOOTSTRAP")
    assert found.evidence["stuck_rooms"] == 2
    assert set(found.agents) == {"decode-0", "decode-1"}
