"""When rooms come, wait, and are decoded."""

from __future__ import annotations

from typing import Any

from kvctl.lab.ranks.messages import Room
from kvctl.lab.ranks.open_schedule import Arrivals, Decoding, RoomVisit

MS = 1_000_000


def room(index: int, **changes: Any) -> Room:
    return Room(**{"index": index, "number": index, "tokens": 4, "prefix_tokens": 0, "decode_dp": 0, **changes})


def taken(arrivals: Arrivals, now_ns: int) -> list[tuple[int, int]]:
    """(index, arrival) of every room that can be taken."""
    found = []
    while (visit := arrivals.take(now_ns)) is not None:
        found.append((visit.room.index, visit.arrival_ns))
    return found


def test_closed_loop_rooms_are_there_at_once_and_arrive_when_they_are_taken():
    arrivals = Arrivals([room(0), room(1)], start_ns=100)
    first = arrivals.take(150)
    assert first is not None
    assert (first.room.index, first.arrival_ns) == (0, 150)
    assert arrivals
    assert taken(arrivals, 900) == [(1, 900)]
    assert not arrivals


def test_rooms_with_an_arrival_wait_for_it_and_then_wait_on_their_own_time():
    arrivals = Arrivals([room(1, arrival_ms=2.0), room(0, arrival_ms=5.0)], start_ns=100)
    assert arrivals.next_ns == 100 + 2 * MS
    assert arrivals.take(100 + MS) is None
    assert taken(arrivals, 100 + 9 * MS) == [(1, 100 + 2 * MS), (0, 100 + 5 * MS)]


def test_what_was_never_taken_is_known():
    arrivals = Arrivals([room(0), room(1, arrival_ms=5.0), room(2, arrival_ms=6.0)], start_ns=0)
    arrivals.take(0)
    assert sorted(each.index for each in arrivals.untaken()) == [1, 2]


def test_without_a_step_time_tokens_come_with_success():
    decoding = Decoding(0)
    visit = RoomVisit(room(0, output_tokens=9), arrival_ns=1, success_ns=40)
    assert decoding.join(visit, 45) == [visit]
    assert visit.row() == [0, 1, 40, 40, 40]
    assert decoding.next_ns is None


def test_a_room_that_starts_while_a_step_is_under_way_joins_the_next():
    decoding = Decoding(10)
    early, late = RoomVisit(room(0, output_tokens=3)), RoomVisit(room(1, output_tokens=1))
    assert decoding.join(early, 100) == []
    assert decoding.next_ns == 110
    assert decoding.join(late, 105) == []
    assert decoding.advance(109) == []
    assert decoding.advance(110) == []
    assert (early.first_ns, late.first_ns) == (110, 0)
    assert decoding.advance(121) == [late]  # a step that is ended late makes the next one late
    assert decoding.next_ns == 131
    assert decoding.advance(131) == [early]
    assert (early.first_ns, early.last_ns, late.first_ns, late.last_ns) == (110, 131, 121, 121)
    assert decoding.next_ns is None
    assert decoding.advance(500) == []
