"""Where rooms go: to ranks that can serve and have a place, to nobody else, and the same way from the same seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvctl.lab.demo.fleet import FleetPlan
from kvctl.lab.demo.traffic import RoomChoice, Router, TrafficOptions
from tests.support.planned_ranks import planned_ranks

ALL = {"p0-prefill-0": [0], "p0-prefill-1": [0], "p1-prefill-0": [1], "decode-0": [0, 1], "decode-1": [0, 1]}


def router(ranks: dict[str, Any], **changes: Any) -> Router:
    options = {name: changes.pop(name) for name in ("aborts", "rate", "bursty") if name in changes}
    plan = FleetPlan(**{"seed": 5, "tokens": (16, 1024), "page_size": 16, "concurrency": 8, **changes})
    return Router(ranks, plan, TrafficOptions(**options))


def chosen(router: Router, serving: dict[str, list[int]], count: int = 200, **in_flight: int) -> list[RoomChoice]:
    found = [router.choose(serving, {int(dp[2:]): many for dp, many in in_flight.items()}, 0) for _ in range(count)]
    assert all(found)
    return found  # type: ignore[return-value]


def test_rooms_go_everywhere_and_each_is_of_its_own_kind():
    choices = chosen(router(planned_ranks(), aborts=0.2), ALL)
    rooms = [choice.room for choice in choices]
    assert len({room.number for room in rooms}) == 200
    assert {(room.instance, room.decode_dp) for room in rooms} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert min(room.tokens for room in rooms) < 32
    assert max(room.tokens for room in rooms) > 512
    assert all(room.prefix_tokens % 16 == 0 and room.prefix_tokens <= room.tokens for room in rooms)
    assert 20 < sum(room.prefix_tokens > 0 for room in rooms) < 80
    assert {choice.send.chunks for choice in choices} == {1, 2, 3}
    assert {choice.send.groups for choice in choices} == {1, 2, 3}
    assert {choice.send.at_once for choice in choices} == {True, False}
    aborted = [choice for choice in choices if choice.aborter]
    assert 20 < len(aborted) < 60
    assert all(choice.aborter in (*choice.room.prefill, *choice.room.decode) for choice in aborted)


def test_the_same_seed_chooses_the_same_rooms():
    assert chosen(router(planned_ranks()), ALL) == chosen(router(planned_ranks()), ALL)
    assert chosen(router(planned_ranks()), ALL) != chosen(router(planned_ranks(), seed=6), ALL)


def test_a_room_takes_its_whole_prefill_instance_and_its_decode_group():
    here = planned_ranks((2,), decode_dp=2, decode_tp=2)
    room = router(here).place(0, 1, 100, now_ns=9).room
    assert room.prefill == ("p0-prefill-0", "p0-prefill-1")
    assert room.decode == ("decode-2", "decode-3")
    assert room.ranks == (*room.prefill, *room.decode)
    assert (room.tokens, room.opened_ns) == (100, 9)


@pytest.mark.parametrize(
    ("down", "left"),
    [("p0-prefill-1", {(1, 0), (1, 1)}), ("p1-prefill-0", {(0, 0), (0, 1)}), ("decode-0", {(0, 1), (1, 1)})],
)
def test_a_rank_that_is_down_gets_none(down: str, left: set[tuple[int, int]]):
    rooms = [choice.room for choice in chosen(router(planned_ranks()), {**ALL, down: []})]
    assert {(room.instance, room.decode_dp) for room in rooms} == left


def test_a_decode_rank_that_has_met_one_instance_only_gets_that_one_s_rooms():
    rooms = [choice.room for choice in chosen(router(planned_ranks()), {**ALL, "decode-1": [1]})]
    assert {(room.instance, room.decode_dp) for room in rooms} == {(0, 0), (1, 0), (1, 1)}


def test_each_decode_group_has_its_share_of_the_rooms_in_flight():
    rooms = [choice.room for choice in chosen(router(planned_ranks()), ALL, dp0=4, dp1=3)]
    assert {room.decode_dp for room in rooms} == {1}
    assert router(planned_ranks()).choose(ALL, {0: 4, 1: 4}, 0) is None


def test_a_rank_without_a_place_waits_until_it_has_one():
    routing = router(planned_ranks())
    for _ in range(FleetPlan(concurrency=8).slots):
        routing.taken("decode-0")
    assert {choice.room.decode_dp for choice in chosen(routing, ALL)} == {1}
    routing.freed("decode-0")
    assert {choice.room.decode_dp for choice in chosen(routing, ALL)} == {0, 1}
    routing.taken("decode-0")
    routing.forget("decode-0")  # its process is gone, and its rooms with it
    assert {choice.room.decode_dp for choice in chosen(routing, ALL)} == {0, 1}


@pytest.mark.parametrize("bursty", [False, True])
def test_rooms_come_at_the_rate_that_was_asked_for(bursty: bool):
    routing = router(planned_ranks(), rate=50.0, bursty=bursty)
    gaps = [routing.gap_s() for _ in range(20_000)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    short = Counter(gap < 1 / 400 for gap in gaps)[True] / len(gaps)
    assert short > 0.5 if bursty else short < 0.2
