"""The order of laps, and the rooms each of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvctl.bench.failures import FleetError
from kvctl.bench.laps import Course
from kvctl_agent.contract.rig import Room


class FleetOnPaper:
    """Notes what it is asked to do, and claims success."""

    def __init__(self, held: Sequence[int] = ()) -> None:
        self.prepared: list[tuple[int, str, tuple[Room, ...]]] = []
        self.verified = 0
        self.held = list(held)

    def prepare(self, lot: int, path: str, rooms: tuple[Room, ...], poison: bool, doing: str) -> None:
        self.prepared.append((lot, path, rooms))

    def run(self, windows: Sequence[int], rooms: Sequence[Room], doing: str) -> dict[str, Any]:
        return {"decode-0": {"held": self.held, "failures": [[0, "decode-0: peer lost"]]}}

    def verify(self, mode: str, rooms: Sequence[Room], doing: str) -> dict[str, Any]:
        self.verified += 1
        return {}


def plan(lots: Sequence[Sequence[Sequence[int]]] = ([[0, 3], [3, 5]], [[0, 2]])) -> Any:
    rooms = [{"tokens": 16, "prefix_tokens": 0, "decode_dp": index % 2, "bytes": 1} for index in range(5)]
    loads = [{"concurrency": 2, "tokens": "16", "windows": [1, 1], "rooms": rooms, "lots": cuts} for cuts in lots]
    return {"paths": ["slice", "staged"], "loads": loads, "room_stride": 4}


def course(fleet: FleetOnPaper, verify: str = "full", repeat: int = 1, **changes: Any) -> Course:
    return Course(fleet, plan(**changes), verify, repeat, lambda text: None)  # type: ignore[arg-type]


def test_paths_and_loads_take_turns_lot_by_lot():
    laps = list(course(FleetOnPaper()).laps())
    assert [(lap.lot, lap.load, lap.path) for lap in laps] == [
        (0, 0, "slice"),
        (0, 0, "staged"),
        (0, 1, "slice"),
        (0, 1, "staged"),
        (1, 0, "slice"),
        (1, 0, "staged"),
    ]


def test_the_length_is_the_number_of_laps():
    every = course(FleetOnPaper(), repeat=3)
    assert every.length == len(list(every.laps())) == 18


def test_paths_run_the_same_rooms_under_numbers_of_their_own():
    slice_lap, staged_lap = list(course(FleetOnPaper(), lots=([[0, 3]],)).laps())
    assert [room.index for room in slice_lap.rooms] == [room.index for room in staged_lap.rooms]
    numbers = [room.number for lap in (slice_lap, staged_lap) for room in lap.rooms]
    assert len(set(numbers)) == 6
    assert all(0 <= number < 1 << 64 for number in numbers)
    assert [room.slot for room in staged_lap.rooms] == [0, 1, 2]


def test_the_position_in_a_lot_decides_the_prefill_group():
    for lap in course(FleetOnPaper()).laps():
        assert [room.number % 4 for room in lap.rooms] == list(range(len(lap.rooms)))


def test_a_lot_has_one_identity_over_all_its_laps_and_no_other_has_it():
    fleet = FleetOnPaper()
    list(course(fleet, repeat=2).laps())
    by_content = {}
    for lot, _, rooms in fleet.prepared:
        by_content.setdefault(tuple(room.index for room in rooms), set()).add(lot)
    assert all(len(lots) == 1 for lots in by_content.values())
    assert len({next(iter(lots)) for lots in by_content.values()}) == len(by_content) == 3


def test_verification_can_be_left_out():
    fleet = FleetOnPaper()
    list(course(fleet, verify="off").laps())
    assert fleet.verified == 0


def test_nothing_runs_after_rooms_that_hold_their_pages():
    with pytest.raises(FleetError, match=r"1 rooms still hold pages after slice.*decode-0: peer lost"):
        list(course(FleetOnPaper(held=[0]), lots=([[0, 3]],)).laps())
