"""KV_DRAINING: draining agents, and no others, are the cause of the rooms that wait or fail because of them."""

from __future__ import annotations

from kvctl.health.finding import Severity
from tests.kvctl.health.fleets import Fleet, S

REFUSED = "prefill-0 is draining and accepts no new rooms"


def drained(*names: str, age_s: float = 30) -> Fleet:
    fleet = Fleet()
    for name in names:
        fleet.status(name, draining=True, accepting=False, draining_age_ns=round(age_s * S))
    return fleet


def test_one_decode_rank_of_two_that_drains_is_information():
    (found,) = drained("decode-1").examine()
    assert (found.code, found.subject, found.severity) == ("KV_DRAINING", "decode-1", Severity.INFO)
    assert found.since_ns == 30 * S
    assert found.cause == "decode-1 is draining, for 30 s now, and accepts no new rooms"
    assert found.remedy.startswith("`kvctl resume decode-1`")


def test_a_role_of_which_nobody_is_left_is_a_warning():
    (found,) = drained("decode-0", "decode-1").examine()
    assert (found.severity, found.agents) == (Severity.WARNING, ("decode-0", "decode-1"))
    assert found.cause.endswith("; no other decode instance accepts rooms")
    assert found.remedy.startswith("`kvctl resume decode-0 decode-1`")
    # Every rank of a prefill instance is needed: one that drains stops the other.
    (found,) = drained("prefill-1").examine()
    assert (found.severity, found.agents) == (Severity.WARNING, ("prefill-1",))


def test_rooms_that_a_prefill_rank_refused_are_counted():
    fleet = drained("prefill-0")
    for room in ("7", "8"):
        fleet.failed(["decode-0", "prefill-0", "prefill-1"], room, "KV_DRAINING", "prefill-0", REFUSED, ago_s=10)
    fleet.failed(["decode-0", "prefill-0"], "9", "KV_DRAINING", "prefill-0", REFUSED, ago_s=100)  # an earlier drain
    (found,) = fleet.examine()
    assert (found.code, found.severity) == ("KV_DRAINING", Severity.CRITICAL)  # there is no other prefill instance
    assert found.evidence["refused_rooms"] == 2
    assert "; 2 rooms refused, the last one " in found.cause


def test_rooms_that_wait_for_a_draining_decode_rank_blame_no_prefill_rank():
    fleet = drained("decode-0", age_s=400)
    for number in range(12):
        for name in ("prefill-0", "prefill-1"):
            fleet.room(name, str(7000 + number), state="Bootstrapping", state_age_ns=160 * S, peers=[])
    fleet.failed(["prefill-0", "prefill-1"], "6999", "KV_ROOM_STUCK_BOOTSTRAP", "prefill-0", "0 of ? opened it")
    (found,) = fleet.examine()
    assert (found.code, found.severity, found.agents) == ("KV_DRAINING", Severity.WARNING, ("decode-0",))
    assert found.evidence["waiting_rooms"] == 12
    assert found.evidence["expired_rooms"] == 1
    assert "12 rooms of prefill ranks wait for a decode rank to open them" in found.cause
    assert "1 room failed because no decode rank opened it in time" in found.cause


def test_rooms_that_waited_before_the_drain_have_another_cause():
    fleet = drained("decode-0", age_s=20)
    fleet.room("prefill-0", "7", state="Bootstrapping", state_age_ns=160 * S, peers=[])
    assert [(one.code, one.subject) for one in fleet.examine()] == [
        ("KV_ROOM_STUCK_BOOTSTRAP", "prefill-0"),
        ("KV_DRAINING", "decode-0"),
    ]


def test_what_a_drain_that_is_over_left_behind_blames_no_prefill_rank():
    fleet = drained("decode-0", age_s=400)
    fleet.status("decode-0", draining=False, accepting=True, resumed_age_ns=30 * S)
    assert fleet.examine() == []
    for number in range(12):
        for name in ("prefill-0", "prefill-1"):
            fleet.room(name, str(7000 + number), state="Bootstrapping", state_age_ns=160 * S, peers=[])
    fleet.failed(["prefill-0", "prefill-1"], "6999", "KV_ROOM_STUCK_BOOTSTRAP", "prefill-0", "0 of ? opened it")
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.severity) == ("KV_DRAINING", "decode-0", Severity.INFO)
    assert found.cause == (
        "decode-0 accepted no new rooms until 30 s ago; 12 rooms of prefill ranks wait for a decode rank to open them; "
        "1 room failed because no decode rank opened it in time"
    )
    fleet.status("decode-0", draining_age_ns=100 * S, resumed_age_ns=30 * S)  # they began before it
    assert {one.code for one in fleet.examine()} == {"KV_ROOM_STUCK_BOOTSTRAP"}


def test_rooms_that_no_decode_rank_opened_are_one_finding():
    fleet = Fleet()
    for name in ("prefill-0", "prefill-1"):
        for room in ("7", "8"):
            fleet.room(name, room, state="Bootstrapping", state_age_ns=160 * S, peers=[])
    (found,) = fleet.examine()
    assert (found.code, found.agents, found.weight) == ("KV_ROOM_STUCK_BOOTSTRAP", ("prefill-0", "prefill-1"), 2)
    assert found.cause.startswith("the engines of prefill-0 and prefill-1 began 2 rooms that no decode rank has opened")


def test_a_room_that_the_decode_rank_gave_up_a_moment_before_the_prefill_rank_is_one_it_had_opened():
    fleet = Fleet()
    fleet.room("prefill-0", "7", state="Bootstrapping", state_age_ns=160 * S, peers=[])
    fleet.failed(["decode-0"], "7", "KV_ROOM_STUCK_BOOTSTRAP", "decode-0", "1 of 2 prefill ranks registered", ago_s=1)
    (found,) = fleet.examine()
    assert (found.code, found.subject) == ("KV_ROOM_STUCK_BOOTSTRAP", "room 7")
    assert "1 of 2 prefill ranks registered" in found.cause
    fleet.room("prefill-0", "8", state="Bootstrapping", state_age_ns=160 * S, peers=[])
    fleet.failed(["decode-0"], "8", "KV_ROOM_STUCK_BOOTSTRAP", "decode-0", "0 of 2", ago_s=300)  # an earlier room 8
    assert any("no decode rank has opened, the oldest, room 8" in found.cause for found in fleet.examine())


def test_an_agent_that_does_not_say_since_when():
    fleet = drained("decode-1")
    del fleet.answers["decode-1"]["status"]["draining_age_ns"]
    (found,) = fleet.examine()
    assert (found.cause, found.since_ns) == ("decode-1 is draining and accepts no new rooms", None)
