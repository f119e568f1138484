"""Rooms joined over ranks: common timeline, state, first failure, and stages of each part."""

from __future__ import annotations

from typing import Any

from kvctl.client.clock import ClockOffset
from kvctl.client.room_timeline import join, most_informative_first

EXACT = ClockOffset(0, 1000)


def details(canned: Any, **options: Any) -> list[Any]:
    return [canned.room_detail(name, **options) for name in ("decode-0", "prefill-0", "prefill-1")]


def clocks(**offsets: ClockOffset) -> dict[str, ClockOffset]:
    return {"decode-0": EXACT, "prefill-0": EXACT, "prefill-1": EXACT} | {
        name.replace("_", "-"): offset for name, offset in offsets.items()
    }


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


def test_parts_join_both_ends(canned: Any) -> None:
    (room,) = join(details(canned), clocks())
    first, second = room.parts
    assert (first.writer, first.decode, first.layers) == (0, "decode-0", (0, 32))
    assert list(first.moments) == ["gate", "queue", "gather", "post", "wire", "arrive", "scatter", "ready"]
    assert first.moments["ready"] == canned.NOW + 4 * canned.MS
    assert "wire" not in second.moments


def test_ranks_of_one_room_are_joined_whatever_their_nonces(canned: Any) -> None:
    """Each decode rank generates its own nonce."""
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
        detail["nonce"] = "2"
        for event in detail["timeline"]:
            event["at_ns"] += 10 * canned.S
    rooms = join([*second, *first], clocks())
    assert [len(room.ranks) for room in rooms] == [3, 3]
    assert rooms[0].started_at_ns - rooms[1].started_at_ns == 10 * canned.S


def paused(canned: Any) -> list[Any]:
    """A room that failed while prefill-0 was stopped; it learned of the room and its failure 8 s later."""
    cause = {"rank": "decode-0", "code": "KV_PEER_LOST", "at_ns": canned.NOW + 13 * canned.S, "text": "silent for 15 s"}
    ranks = details(canned)
    for detail in ranks:
        detail |= {"state": "Failed", "failure": dict(cause), "finished_at_ns": canned.NOW + 13 * canned.S}
        detail["age_ns"] = 13 * canned.S
    late = next(detail for detail in ranks if detail["agent"] == "prefill-0")
    late |= {"opened_at_ns": canned.NOW + 21 * canned.S, "finished_at_ns": canned.NOW + 21 * canned.S, "timeline": []}
    late |= {"age_ns": 0}
    return ranks


def test_a_rank_that_was_stopped_joins_the_room_it_missed(canned: Any) -> None:
    (room,) = join(paused(canned), clocks())
    assert [rank["agent"] for rank in room.ranks] == ["prefill-0", "prefill-1", "decode-0"]
    assert room.failed_after_ns == 13 * canned.S
    assert room.age_ns == 21 * canned.S


def test_ranks_are_joined_by_any_nonce_of_theirs(canned: Any) -> None:
    """A prefill rank has a nonce of each decode rank and shows the first."""
    ranks = paused(canned)
    for detail in ranks:
        detail["failure"] = None
    late = next(detail for detail in ranks if detail["agent"] == "prefill-0")
    late |= {"nonce": "9", "nonces": ["9", canned.NONCE]}
    assert len(join(ranks, clocks())) == 1


def test_a_rank_at_which_the_room_was_never_opened_is_joined_by_the_failure(canned: Any) -> None:
    ranks = paused(canned)
    late = next(detail for detail in ranks if detail["agent"] == "prefill-0")
    late |= {"nonce": "0", "nonces": []}
    (room,) = join(ranks, clocks())
    assert room.nonce == canned.NONCE


def test_records_of_no_common_mark_are_still_two_uses(canned: Any) -> None:
    ranks = paused(canned)
    late = next(detail for detail in ranks if detail["agent"] == "prefill-0")
    late |= {"nonce": "0", "failure": None}
    assert len(join(ranks, clocks())) == 2


def test_the_clock_of_the_rank_that_failed_is_known_where_it_answered(canned: Any) -> None:
    """The rank answers although it no longer knows the room."""
    only = [detail for detail in paused(canned) if detail["agent"] == "prefill-0"]
    (room,) = join(only, clocks())
    assert "decode-0" in room.clocks
    assert room.failed_after_ns == -8 * canned.S


def test_a_failure_within_the_error_of_the_clocks_is_not_before_the_room(canned: Any) -> None:
    ranks = details(canned, failed=True)
    for detail in ranks:
        detail["failure"] = {"rank": "prefill-1", "code": "timeout", "at_ns": canned.NOW - 5, "text": "late"}
        detail |= {"opened_at_ns": canned.NOW, "timeline": []}
    (room,) = join(ranks, clocks())
    assert room.failed_after_ns == 0


def test_what_most_is_known_of_comes_first(canned: Any) -> None:
    """Active rooms come first, then rooms known to both prefill and decode ranks, even if they are older."""
    whole, alone, active = paused(canned), canned.room_detail("prefill-0"), canned.room_detail("prefill-0")
    for newer in (alone, active):
        newer |= {"nonce": "2", "timeline": [], "opened_at_ns": canned.NOW + 60 * canned.S}
    alone["finished_at_ns"] = canned.NOW + 61 * canned.S
    found = join([*whole, alone], clocks())
    assert [len(room.ranks) for room in found] == [1, 3]
    assert [len(room.ranks) for room in most_informative_first(found)] == [3, 1]
    assert [len(room.ranks) for room in most_informative_first(join([*whole, active], clocks()))] == [1, 3]


def owed(writer: str, cells: int, waits_for: str = "", **more: Any) -> dict[str, Any]:
    where = {"chunks": [0, 2], "layers": [0, 32], "finals": 0, "age_ns": 5}
    return {"writer": writer, "decode": "decode-0", "cells": cells, "waits_for": waits_for, **where, **more}


def test_a_writer_says_what_its_parts_wait_for(canned: Any) -> None:
    ranks = details(canned)
    ranks[0]["owed_parts"] = [owed("prefill-0", 8), owed("prefill-1", 4)]
    ranks[1]["owed_parts"] = [owed("prefill-0", 2, "a grant", age_ns=9), owed("prefill-0", 3, "its write to end")]
    ranks[2]["owed_parts"] = []
    (room,) = join(ranks, clocks())
    assert [(part.writer, part.cells, part.waits_for) for part in room.missing_parts] == [
        ("prefill-0", 2, "waits for a grant"),
        ("prefill-0", 3, "waits for its write to end"),
        ("prefill-0", 3, "says that they are sent, and they have not arrived"),
        ("prefill-1", 4, "says that they are sent, and they have not arrived"),
    ]


def test_a_writer_that_tells_nothing_owes_what_has_not_arrived(canned: Any) -> None:
    decode, failed = canned.room_detail("decode-0"), canned.room_detail("prefill-0", failed=True)
    decode["owed_parts"] = [owed(f"prefill-{number}", cells) for number, cells in enumerate((8, 4, 4, 3))]
    (room,) = join([decode, failed], clocks(), silent={"prefill-3": "its process 7 is stopped"})
    assert [(part.writer, part.cells, part.waits_for) for part in room.missing_parts] == [
        ("prefill-0", 8, "has failed the room"),
        ("prefill-1", 4, "does not know the room"),
        ("prefill-2", 4, "was not asked or did not answer"),
        ("prefill-3", 3, "does not answer: its process 7 is stopped"),
    ]


def test_without_their_decode_rank_writers_are_believed(canned: Any) -> None:
    writer = canned.room_detail("prefill-0")
    writer["owed_parts"] = [owed("prefill-0", 2, "a grant")]
    (room,) = join([writer], clocks())
    assert [(part.decode, part.waits_for) for part in room.missing_parts] == [("decode-0", "waits for a grant")]
