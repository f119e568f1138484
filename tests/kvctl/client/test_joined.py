"""One room over its ranks: one time axis, one state, the first failure, the life of each part."""

from __future__ import annotations

from typing import Any

from kvctl.client.clock import ClockOffset
from kvctl.client.joined import join

EXACT = ClockOffset(0, 1000)


def details(canned: Any, **options: Any) -> list[Any]:
    return [canned.room_detail(name, **options) for name in ("decode-0", "prefill-0", "prefill-1")]


def clocks(**offsets: ClockOffset) -> dict[str, ClockOffset]:
    return {"decode-0": EXACT, "prefill-0": EXACT, "prefill-1": EXACT} | {
        name.replace("_", "-"): offset for name, offset in offsets.items()
    }


def test_events_of_all_ranks_are_in_order(canned: Any) -> None:
    (room,) = join(details(canned), clocks())
    assert [event["relative_ns"] for event in room.timeline] == sorted(event["relative_ns"] for event in room.timeline)
    assert {event["agent"] for event in room.timeline} == {"decode-0", "prefill-0", "prefill-1"}
    assert [rank["agent"] for rank in room.ranks] == ["prefill-0", "prefill-1", "decode-0"]


def test_a_clock_that_is_ahead_is_set_right(canned: Any) -> None:
    """The same events, stamped by a clock one hour ahead, give the same timeline."""
    ahead = 3600 * canned.S
    shifted = details(canned)
    for event in shifted[1]["timeline"]:
        event["at_ns"] += ahead
    shifted[1]["opened_at_ns"] += ahead
    (room,) = join(shifted, clocks(prefill_0=ClockOffset(ahead, 1000)))
    (reference,) = join(details(canned), clocks())
    assert room.timeline == reference.timeline
    assert room.started_at_ns == reference.started_at_ns


def test_the_first_cause_wins_not_the_first_speaker(canned: Any) -> None:
    (room,) = join(details(canned, failed=True), clocks())
    assert room.state == "Failed"
    assert room.failing_rank == "prefill-1"
    # By prefill-1's clock, 10 s behind, its failure would be the later one.
    late = details(canned, failed=True)
    for detail in late[1:]:
        detail["failure"]["at_ns"] += 10 * canned.S
    (room,) = join(late, clocks(prefill_1=ClockOffset(10 * canned.S, 1000)))
    assert room.failing_rank == "prefill-1"


def test_one_failed_rank_fails_the_room(canned: Any) -> None:
    mixed = details(canned)
    mixed[0]["state"] = "Success"
    mixed[1]["state"] = "Failed"
    assert join(mixed, clocks())[0].state == "Failed"


def test_parts_join_both_ends(canned: Any) -> None:
    (room,) = join(details(canned), clocks())
    first, second = room.parts
    assert (first.writer, first.decode, first.layers) == (0, "decode-0", (0, 32))
    assert list(first.moments) == ["gate", "queue", "gather", "post", "wire", "arrive", "scatter", "ready"]
    assert first.moments["ready"] == canned.NOW + 4 * canned.MS
    assert "wire" not in second.moments


def test_a_reused_number_is_two_rooms_the_newest_first(canned: Any) -> None:
    newer = canned.room_detail("decode-0")
    newer |= {"nonce": "2", "opened_at_ns": canned.NOW + canned.S, "timeline": []}
    rooms = join([*details(canned), newer], clocks())
    assert [room.nonce for room in rooms] == ["2", canned.NONCE]
    assert rooms[0].parts == []


def test_ranks_of_one_room_are_joined_whatever_their_nonces(canned: Any) -> None:
    """Each decode rank mints its own nonce."""
    apart = details(canned)
    for number, detail in enumerate(apart):
        detail["nonce"] = str(number)
    (room,) = join(apart, clocks())
    assert len(room.ranks) == 3


def test_a_number_used_again_is_another_life(canned: Any) -> None:
    first, second = details(canned), details(canned)
    for detail in first:
        detail["finished_at_ns"] = detail["opened_at_ns"] + canned.S
    for detail in second:
        detail["opened_at_ns"] += 10 * canned.S
        for event in detail["timeline"]:
            event["at_ns"] += 10 * canned.S
    rooms = join([*second, *first], clocks())
    assert [len(room.ranks) for room in rooms] == [3, 3]
    assert rooms[0].started_at_ns - rooms[1].started_at_ns == 10 * canned.S
