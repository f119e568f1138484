"""Room records: what rows say while a room lives and after, and what is kept of finished ones."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from kvctl_agent.contract.snapshots import Failure, Role, RoomDetail, RoomRow
from kvctl_agent.contract.states import RoomState
from kvctl_agent.observer.room_records import FAILED_BYTES, FoldedRoom, Part, RoomRecords
from kvctl_agent.telemetry.clock import Clock


class FrozenClock(Clock):
    """A clock that stands where the test puts it; its wall clock is 1000 ahead."""

    def __init__(self, at: int = 0) -> None:
        self.offset_ns = 1000
        self.at = at
        self.now_ns = lambda: self.at


def book(
    clock: Clock, role: Role = "decode", history: int = 3, timeline_events: int = 4, failed: int = 3
) -> RoomRecords:
    return RoomRecords(clock, "decode-0", role, history, timeline_events, failed)


def fail(rooms: RoomRecords, clock: FrozenClock, room: int, code: str = "KV_PEER_LOST") -> FoldedRoom:
    record = rooms.open(room, room + 1)
    clock.at += 1
    record.fail(failure(code), clock.at)
    record.state(RoomState.FAILED, clock.at)
    rooms.close(record)
    return record


def failure(code: str) -> Failure:
    return {"rank": "prefill-1", "code": code, "at_ns": 5, "text": "gone"}


def finish(rooms: RoomRecords, clock: FrozenClock, room: int, took: int, state: RoomState = RoomState.SUCCESS) -> None:
    record = rooms.open(room, room)
    clock.at += took
    record.state(state, clock.at)
    rooms.close(record)


def test_the_row_of_a_living_room() -> None:
    clock = FrozenClock(at=100)
    rooms = book(clock)
    record = rooms.open(2**64 - 1, 7)
    record.peers.append("prefill-0")
    record.planned = 12
    record.landed = 4
    record.tokens, record.pages = 640, 10
    record.part(Part((0, 0, (0, 4)), None, "bulk", 50, {}))
    record.part(Part((0, 0, (0, 4)), None, "bulk", 50, {}))
    record.part(Part((0, 0, (0, 4)), None, "staged", 20, {}))
    record.parked = 1
    clock.at = 130
    record.state(RoomState.TRANSFERRING, 130)
    clock.at = 150
    assert rooms.rows(None, 10) == [
        {
            "room": "18446744073709551615",
            "nonce": "7",
            "nonces": [],
            "request_id": None,
            "agent": "decode-0",
            "role": "decode",
            "state": "Transferring",
            "state_age_ns": 20,
            "age_ns": 50,
            "opened_at_ns": 1100,
            "finished_at_ns": None,
            "peers": ["prefill-0"],
            "coverage": {"planned": 12, "sent": None, "landed": 4, "scattered": 0},
            "tokens": 640,
            "pages": 10,
            "bytes": 120,
            "parts": 3,
            "paths": {"bulk": 2, "staged": 1},
            "parked": 1,
            "latency_ns": None,
            "forward_done_at_ns": None,
            "hidden_ns": None,
            "exposed_ns": None,
            "missing": [],
            "owed": {},
            "unscattered": 4,
            "failure": None,
        }
    ]
    assert rooms.rows(None, 10)[0].keys() == RoomRow.__annotations__.keys()


def test_rows_by_state_and_limit() -> None:
    rooms = book(Clock())
    for number in range(5):
        record = rooms.open(number, 0)
        if number % 2:
            record.state(RoomState.TRANSFERRING, 1)
    assert [row["room"] for row in rooms.rows(None, 3)] == ["0", "1", "2"]
    assert [row["room"] for row in rooms.rows("Transferring", 10)] == ["1", "3"]
    assert rooms.rows("Failed", 10) == []
    assert rooms.states() == {"Bootstrapping": 3, "Transferring": 2}


class TestEnd:
    def test_ages_stop_and_the_end_is_known(self) -> None:
        clock = FrozenClock(at=100)
        rooms = book(clock)
        finish(rooms, clock, 1, took=40)
        clock.at = 10_000
        (row,) = rooms.history(10)
        assert (row["age_ns"], row["state_age_ns"], row["finished_at_ns"]) == (40, 0, 1140)
        assert rooms.active() == []

    def test_latency_of_a_decode_rank_is_open_to_success(self) -> None:
        clock = FrozenClock(at=100)
        rooms = book(clock)
        finish(rooms, clock, 1, took=40)
        assert rooms.history(1)[0]["latency_ns"] == 40

    def test_latency_of_a_prefill_rank_starts_at_the_first_ready_part(self) -> None:
        clock = FrozenClock(at=100)
        rooms = book(clock, "prefill")
        record = rooms.open(1, 1)
        record.event("ready", 130)
        record.event("ready", 150)
        record.state(RoomState.SUCCESS, 200)
        record.finish(200)
        rooms.close(record)
        (row,) = rooms.history(1)
        assert row["latency_ns"] == 70
        assert row["coverage"] == {"planned": 0, "sent": 0, "landed": None, "scattered": None}

    def test_a_prefill_rank_that_owed_nothing_has_no_latency(self) -> None:
        clock = FrozenClock()
        rooms = book(clock, "prefill")
        finish(rooms, clock, 1, took=5)
        assert rooms.history(1)[0]["latency_ns"] is None
        assert rooms.slow(1) == []

    def test_a_failed_room_has_no_latency_and_keeps_its_first_cause(self) -> None:
        clock = FrozenClock()
        rooms = book(clock)
        record = rooms.open(1, 1)
        record.fail(failure("peer-lost"), 8)
        record.fail(failure("timeout"), 9)
        record.state(RoomState.FAILED, 9)
        rooms.close(record)
        (row,) = rooms.history(1)
        assert row["latency_ns"] is None
        assert row["failure"] == failure("peer-lost")
        assert rooms.slow(1) == []

    def test_the_failure_is_in_the_timeline_however_long_that_is(self) -> None:
        rooms = book(FrozenClock(), timeline_events=2)
        record = rooms.open(1, 1)
        for at in range(5):
            record.event("ready", at)
        record.fail(failure("peer-lost"), 8)
        record.fail(failure("timeout"), 9)
        assert [(event.stage, event.at_ns) for event in record.events] == [("ready", 0), ("ready", 1), ("fail", 8)]
        assert "peer-lost" in record.events[-1].detail
        assert record.events_dropped == 3

    def test_the_failure_takes_no_place_of_a_part_that_follows_it(self) -> None:
        record = book(FrozenClock(), timeline_events=4).open(1, 1)
        record.event("ready", 0)
        record.fail(failure("peer-lost"), 1)
        for number in range(3):
            record.part(Part((0, number, (0, 8)), None, "bulk", 0, {"wire": 2, "arrive": 3}))
        assert [event.stage for event in record.events] == ["ready", "fail", "wire", "arrive", "wire"]
        assert record.events_dropped == 3

    def test_parts_without_moments_take_no_memory(self) -> None:
        record = book(FrozenClock()).open(1, 1)
        before = record.nbytes
        for _ in range(100):
            record.part(Part((0, 0, (0, 8)), None, "bulk", 0, {}))
        assert (record.events, record._events, record.parts) == ([], [], 100)
        assert record.nbytes <= before + 1000

    def test_closing_twice_counts_once(self) -> None:
        rooms = book(Clock())
        record = rooms.open(1, 1)
        rooms.close(record)
        rooms.close(record)
        assert len(rooms.history(10)) == 1

    def test_latest_and_slowest_are_bounded_and_ordered(self) -> None:
        clock = FrozenClock()
        rooms = book(clock, history=3)
        for room, took in enumerate([10, 90, 20, 80, 30, 70, 40, 40]):
            finish(rooms, clock, room, took)
        assert [row["room"] for row in rooms.history(10)] == ["7", "6", "5"]
        assert [row["latency_ns"] for row in rooms.slow(10)] == [90, 80, 70]
        assert [row["latency_ns"] for row in rooms.slow(2)] == [90, 80]
        assert [row["room"] for row in rooms.history(1)] == ["7"]

    def test_no_history_is_allowed(self) -> None:
        clock = FrozenClock()
        rooms = book(clock, history=0)
        finish(rooms, clock, 1, took=5)
        assert rooms.history(10) == rooms.slow(10) == []


class TestFailedRooms:
    def test_successes_do_not_push_failures_out(self) -> None:
        clock = FrozenClock()
        rooms = book(clock, history=2)
        fail(rooms, clock, 1)
        for room in range(10, 20):
            finish(rooms, clock, room, took=1)
        assert [row["room"] for row in rooms.failed(10)["rooms"]] == ["1"]
        (detail,) = rooms.detail(1)
        assert [event["stage"] for event in detail["timeline"]] == ["fail"]

    def test_the_latest_come_first_and_those_that_went_are_counted(self) -> None:
        clock = FrozenClock()
        rooms = book(clock, failed=3)
        for room in range(5):
            fail(rooms, clock, room)
        found = rooms.failed(2)
        assert [row["room"] for row in found["rooms"]] == ["4", "3"]
        assert (found["kept"], found["dropped_total"]) == (3, 2)

    def test_a_burst_of_one_cause_leaves_the_others_there(self) -> None:
        clock = FrozenClock()
        rooms = book(clock, failed=4)
        fail(rooms, clock, 1, "KV_DEVICE")
        for room in range(10, 30):
            fail(rooms, clock, room)
        assert [row["room"] for row in rooms.failed(10)["rooms"]] == ["29", "28", "27", "1"]

    def test_a_failed_room_that_waits_for_its_writers_is_one_of_them(self) -> None:
        clock = FrozenClock()
        rooms = book(clock)
        fail(rooms, clock, 1)
        record = rooms.open(2, 2)
        record.fail(failure("timeout"), 8)
        record.state(RoomState.FAILED, 8)
        found = rooms.failed(10)
        assert [(row["room"], row["finished_at_ns"] is None) for row in found["rooms"]] == [("2", True), ("1", False)]
        assert found["kept"] == 2

    def test_none_are_kept_where_none_are_wanted(self) -> None:
        clock = FrozenClock()
        rooms = book(clock, failed=0)
        fail(rooms, clock, 1)
        assert rooms.failed(10) == {"rooms": [], "kept": 0, "dropped_total": 1}

    def test_their_timelines_are_bounded_in_bytes_of_real_memory(self) -> None:
        """More rooms than there is room for, each with all the events there may be, each with its own values."""
        clock = FrozenClock()
        rooms = book(clock, history=0, timeline_events=512, failed=256)
        tracemalloc.start()
        try:
            for room in range(96):
                record = rooms.open(room, room + (1 << 62))
                for event in range(512):
                    moment = (room << 40) + (event << 20)
                    record.event(
                        "scatter", moment, event, event << 10, (event << 9, event << 11), "", "", "bulk", moment
                    )
                record.fail({**failure("timeout"), "text": f"{room} " + "x" * 400}, 1 << 50)
                rooms.close(record)
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        found = rooms.failed(1000)
        assert found["kept"] + found["dropped_total"] == 96
        assert 0 < found["kept"] < 96
        assert FAILED_BYTES / 4 < used < FAILED_BYTES

    def test_a_storm_costs_the_thread_that_runs_rooms_little(self, at_best: Any) -> None:
        """Also where each failure has a code of its own, as a peer could make them."""
        clock = FrozenClock()
        rooms = book(clock, history=0, failed=256)
        numbers = itertools.count()

        def storm(code: Callable[[int], str]) -> float:
            began = time.process_time()
            for room in itertools.islice(numbers, 4000):
                fail(rooms, clock, room, code(room))
            return (time.process_time() - began) / 4000

        at_best(lambda: storm(lambda room: "KV_PEER_LOST"), 200e-6)
        at_best(lambda: storm(lambda room: f"CODE_{room}"), 400e-6)
        assert rooms.failed(1000)["kept"] == 256


class TestNumbers:
    def test_decode_ranks_of_one_room_are_told_apart_by_nonce(self) -> None:
        rooms = book(Clock(), "prefill")
        first, second = rooms.open(7, 1), rooms.open(7, 2)
        assert rooms.find(7) == [first, second]
        assert [detail["nonce"] for detail in rooms.detail(7)] == ["1", "2"]

    def test_active_first_then_latest_then_slow_each_once(self) -> None:
        clock = FrozenClock()
        rooms = book(clock, history=2)
        for nonce, took in enumerate([90, 1, 2, 3]):
            record = rooms.open(7, nonce)
            clock.at += took
            record.state(RoomState.SUCCESS, clock.at)
            rooms.close(record)
        rooms.open(7, 99)
        rooms.open(8, 1)
        assert [record.nonce for record in rooms.find(7)] == [99, 3, 2, 0]

    def test_an_unknown_room(self) -> None:
        assert book(Clock()).find(1) == []
        assert book(Clock()).detail(1) == []


class TestTimeline:
    def test_moments_in_the_order_told(self) -> None:
        rooms = book(FrozenClock())
        record = rooms.open(1, 1)
        record.event("open", 10, peer="prefill-0", detail="nonce 1")
        record.event("arrive", 20, writer=2, chunk=3, layers=(0, 4), peer="prefill-2", path="bulk", nbytes=4096)
        (detail,) = rooms.detail(1)
        assert detail.keys() == RoomDetail.__annotations__.keys()
        assert detail["timeline"] == [
            {
                "at_ns": 1010,
                "agent": "decode-0",
                "stage": "open",
                "writer": None,
                "chunk": None,
                "layers": None,
                "peer": "prefill-0",
                "detail": "nonce 1",
            },
            {
                "at_ns": 1020,
                "agent": "decode-0",
                "stage": "arrive",
                "writer": 2,
                "chunk": 3,
                "layers": [0, 4],
                "peer": "prefill-2",
                "detail": "bulk 4096 bytes",
            },
        ]

    def test_beyond_the_limit_moments_are_counted(self) -> None:
        rooms = book(Clock(), timeline_events=4)
        record = rooms.open(1, 1)
        for at in range(10):
            record.event("post", at)
        (detail,) = rooms.detail(1)
        assert [event["at_ns"] for event in detail["timeline"]] == [rooms._clock.wall_ns(at) for at in range(4)]
        assert detail["timeline_dropped"] == 6

    def test_the_first_ready_part_is_known_even_without_a_timeline(self) -> None:
        record = FoldedRoom(1, 1, 1, "prefill", 0, event_limit=0)
        record.event("ready", 5)
        assert (record.first_ready_at, record.events_dropped) == (5, 1)
