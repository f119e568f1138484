"""Which rooms are given up, by whom and when: agreed on by all ranks without a word."""

from __future__ import annotations

from typing import Any

from kvctl.lab.faults.batch_faults import ABORTED, Aborts
from kvctl.lab.ranks.messages import Room, Start
from kvctl.lab.ranks.request import Sizes

MS = 1_000_000
PREFILL, DECODE = Sizes(pp=2, tp=2), Sizes(dp=2, tp=2)


class Handle:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)


def start(role: str, unique: int, seed: int = 1) -> Start:
    fields: dict[str, Any] = {"name": f"{role}-{unique}", "fleet_dir": "", "bootstraps": (), "shape": {}}
    fields |= {"page_size": 4, "page_order": "random", "pool_pages": 1, "state_slots": {}, "aux_slots": 1}
    instance = 0 if role == "prefill" else -1
    return Start(role=role, instance=instance, unique=unique, prefill=(PREFILL,), decode=DECODE, seed=seed, **fields)


def room(index: int) -> Room:
    return Room(index=index, number=900 + index, tokens=64, prefix_tokens=0, decode_dp=0)


def given_up(role: str, unique: int, share: float, rooms: int = 1000, seed: int = 1) -> set[int]:
    """Rooms that a rank gives up when none of them ends by itself."""
    aborts = Aborts(start(role, unique, seed), share)
    handles = {index: Handle() for index in range(rooms)}
    for index, handle in handles.items():
        aborts.began(room(index), handle, 0)
    aborts.abort_due(10**12)
    assert aborts.next_ns is None
    assert all(handle.reasons in ([], [ABORTED]) for handle in handles.values())
    return {index for index, handle in handles.items() if handle.reasons}


def test_every_doomed_room_has_one_rank_that_gives_it_up() -> None:
    ranks = [("prefill", unique) for unique in range(4)] + [("decode", unique) for unique in range(2)]  # dp group 0
    struck = [given_up(role, unique, 0.3) for role, unique in ranks]
    together = set().union(*struck)
    assert sum(map(len, struck)) == len(together)
    assert 200 < len(together) < 400
    assert all(struck)
    # Every decode dp group has such ranks: which one has the room makes no difference.
    assert [given_up("decode", unique, 0.3) for unique in (2, 3)] == struck[4:]


def test_the_seed_draws_them_again() -> None:
    assert given_up("decode", 0, 0.3) == given_up("decode", 0, 0.3)
    assert given_up("decode", 0, 0.3) != given_up("decode", 0, 0.3, seed=2)
    assert given_up("decode", 0, 0.0) == set()


def test_they_come_within_the_time_that_rooms_take() -> None:
    aborts = Aborts(start("decode", 0), 1.0)
    for index in range(100):
        aborts.began(room(index), Handle(), 0)
        aborts.ended(900 + index, 20 * MS)
    handles = {index: Handle() for index in range(100, 200)}
    for index, handle in handles.items():
        aborts.began(room(index), handle, 1000 * MS)
    assert aborts.next_ns is not None
    assert 1000 * MS <= aborts.next_ns < 1020 * MS
    aborts.abort_due(1010 * MS)
    half = sum(bool(handle.reasons) for handle in handles.values())
    aborts.abort_due(1020 * MS)
    everyone = sum(bool(handle.reasons) for handle in handles.values())
    assert 0 < half < everyone
    assert aborts.next_ns is None


def test_a_room_that_is_over_is_not_given_up() -> None:
    aborts = Aborts(start("decode", 0), 1.0)
    handle = Handle()
    for index in range(100):
        aborts.began(room(index), handle, 0)
        aborts.ended(900 + index, MS)
    aborts.abort_due(10**12)
    assert handle.reasons == []
