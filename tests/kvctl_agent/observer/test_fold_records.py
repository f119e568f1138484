"""Whatever a reader misses, and whenever it begins, the fold shows the rooms that there are; no record can break it."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.contract.states import RoomState
from kvctl_agent.observer.fold import Fold, FoldedRegion
from kvctl_agent.telemetry import records as rec
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.metrics import Counters
from kvctl_agent.telemetry.region import LEAST_LOG_BYTES, Cell, Header, MemoryReader, RegionWriter
from kvctl_agent.telemetry.room_records import RoomRecord
from tests.support.folded import LIMITS

FIELDS = (
    "room",
    "nonce",
    "nonces",
    "opened_at",
    "state_now",
    "state_at",
    "first_ready_at",
    "forward_begun_at",
    "forward_done_at",
    "finished_at",
    "failure",
    "peers",
    "request_id",
    "traceparent",
    "planned",
    "sent",
    "landed",
    "scattered",
    "tokens",
    "pages",
    "bytes",
    "parts",
    "parked",
)
KEY = (0, 0, (0, 4))
CODES = ("ABORTED", "KV_PEER_LOST")


def small_telemetry(role: Any = "prefill") -> Telemetry:
    return Telemetry("me", role, RegionWriter(Header.of_this_process(role, "me", log_bytes=LEAST_LOG_BYTES)))


def reader_of(telemetry: Telemetry, *, asks: bool = True) -> FoldedRegion:
    """A new reader in the process of the agent, or elsewhere: then the agent's loop has to flush."""
    flush = partial(telemetry.flush, wait=True) if asks else lambda: None
    return FoldedRegion(MemoryReader(telemetry.region), flush, **LIMITS)


def overrun(telemetry: Telemetry) -> None:
    """Writes more than the log has room for."""
    for _ in range(LEAST_LOG_BYTES // 30_000 + 3):
        telemetry.region.append(msgspec.msgpack.encode((rec.TRANSFER_CANCELLED, 0, 0, "x" * 30_000)))


def faults(fold: Fold) -> float:
    return fold.metrics.total("kvctl_log_gaps_total", "unreadable")


def shown(room: Any) -> dict[str, Any]:
    return {field: getattr(room, field) for field in FIELDS}


class Agent:
    """An agent that rooms happen to, and what happened."""

    def __init__(self) -> None:
        self.telemetry = small_telemetry()
        self.active: list[RoomRecord] = []
        self.ended: list[dict[str, Any]] = []
        self.now = 0
        self.nonces = 0

    def do(self, what: str, which: int, value: int) -> None:
        self.now += 1
        if what == "open":
            self.nonces += 1
            self.active.append(self.telemetry.open(value, self.nonces))
        elif what == "note":
            self.telemetry.recorder.record("test", f"{self.now}")
        elif self.active:
            self._change(self.active[which % len(self.active)], what, value)

    def _change(self, record: RoomRecord, what: str, value: int) -> None:
        if what == "set":
            record.planned, record.tokens, record.request_id = value, value, f"cmpl-{value}"
        elif what == "count":
            record.sent = (record.sent or 0) + value
            record.parked += 1
        elif what == "join":
            record.join(f"decode-{value}", value)
        elif what == "leave" and record.peers:
            record.leave(record.peers[value % len(record.peers)], record.nonces[value % len(record.nonces)])
        elif what == "part":
            moments = {"ready": self.now, "wire": self.now + 1}
            self.telemetry.part(record, KEY, "decode-0", "bulk", value, moments, self.now)
        elif what == "state":
            record.state(RoomState.TRANSFERRING, self.now)
        elif what == "fail":
            record.fail({"rank": "me", "code": CODES[value % 2], "at_ns": value, "text": "why"}, self.now)
        elif what == "finish":
            record.state(RoomState.FAILED if record.failure else RoomState.SUCCESS, self.now)
            self.telemetry.finish(record, self.now)
            self.active.remove(record)
            self.ended.append(shown(record))


KINDS = ("open", "open", "set", "count", "join", "leave", "part", "part", "state", "fail", "finish", "note")
Steps = list[tuple[str, int, int]]


def steps(*more: str) -> st.SearchStrategy[Steps]:
    kinds = st.sampled_from([*KINDS, "flush", "read", "restart", *more])
    return st.lists(st.tuples(kinds, st.integers(0, 9), st.integers(0, 5)), max_size=80)


def happened(steps: Steps) -> tuple[Agent, Fold]:
    """Has an agent do something, and readers come and go."""
    agent = Agent()
    reader = reader_of(agent.telemetry)
    for what, which, value in steps:
        if what == "flush":
            agent.telemetry.flush()
        elif what == "read":
            reader.catch_up()
        elif what == "restart":
            reader = reader_of(agent.telemetry)
        elif what == "overrun":
            overrun(agent.telemetry)
        else:
            agent.do(what, which, value)
    return agent, reader.catch_up()


class TestEquality:
    @settings(deadline=None)
    @given(steps=steps())
    def test_without_loss_the_fold_shows_all_that_happened(self, steps: Steps) -> None:
        agent, fold = happened(steps)
        assert fold.complete
        assert faults(fold) == 0
        assert [shown(room) for room in fold.rooms.active()] == [shown(record) for record in agent.active]
        found = [room for number in range(6) for room in fold.rooms.find(number) if room not in fold.rooms.active()]
        assert sorted(repr(shown(room)) for room in found) == sorted(map(repr, agent.ended))
        assert_counted(fold, agent.telemetry.metrics)
        done = [each for each in agent.ended if each["state_now"] is RoomState.SUCCESS and each["first_ready_at"]]
        assert fold.latencies.summary()["count"] == len(done)
        notes = [event["text"] for event in fold.recorder.since(0, 999)["events"]]
        assert len(notes) == sum(what == "note" for what, _, _ in steps)
        parts = sum(room.paths.get("bulk", 0) for room in [*found, *fold.rooms.active()])
        assert parts == fold.metrics.total("kvctl_parts_total")
        assert sum(row["parts"] for row in fold.stages.rows()) == parts

    @settings(deadline=None)
    @given(steps=steps("overrun"))
    def test_after_a_loss_it_shows_the_active_rooms_and_all_counters(self, steps: Steps) -> None:
        agent, fold = happened(steps)
        assert fold.complete
        assert [shown(room) for room in by_serial(fold)] == [shown(record) for record in agent.active]
        assert_counted(fold, agent.telemetry.metrics)


def assert_counted(fold: Fold, metrics: Counters) -> None:
    """The fold has the agent's counters, and no others but those of its own log."""
    names = {name for name, _ in metrics.series}
    for name in names:
        assert fold.metrics.totals(name) == metrics.totals(name)
    shown = {each["name"] for each in fold.metrics.snapshot() if each["kind"] == "counter" and each["samples"]}
    assert {name for name in shown - names if fold.metrics.total(name)} <= {"kvctl_log_gaps_total"}


def by_serial(fold: Fold) -> list[Any]:
    return sorted(fold.rooms.active(), key=lambda room: room.serial)


class TestLoss:
    def test_rooms_that_ended_unseen_are_forgotten(self) -> None:
        telemetry = small_telemetry()
        reader = reader_of(telemetry)
        ending, staying = telemetry.open(1, 1), telemetry.open(2, 1)
        assert len(reader.catch_up().rooms) == 2
        ending.state(RoomState.SUCCESS, 5)
        telemetry.finish(ending, 5)
        overrun(telemetry)
        staying.planned = 7
        fold = reader.catch_up()
        assert fold.metrics.total("kvctl_log_gaps_total", "lost") == 1
        assert [(room.room, room.planned) for room in fold.rooms.active()] == [(2, 7)]
        assert fold.rooms.find(1) == []  # how it ended is not known

    def test_a_reader_elsewhere_is_answered_by_the_next_turns_of_the_loop(self) -> None:
        """At most 64 rooms a turn, however many there are."""
        telemetry = small_telemetry()
        for number in range(200):
            telemetry.open(number, 1)
        overrun(telemetry)
        reader = reader_of(telemetry, asks=False)
        assert not reader.catch_up().complete
        telemetry.flush()
        assert len(reader.catch_up().rooms) == 64
        assert (
            reader.catch_up().metrics.total("kvctl_log_gaps_total", "lost") == 0
        )  # it began late, and has missed nothing
        newcomer = telemetry.open(300, 1)
        telemetry.finish(newcomer, 5)
        telemetry.finish(telemetry.rooms.active()[150], 5)  # before it was written
        telemetry.finish(telemetry.rooms.active()[3], 5)  # after it was written
        for complete in (False, False, True):
            telemetry.flush()
            assert reader.catch_up().complete == complete
        fold = reader.catch_up()
        assert [room.room for room in by_serial(fold)] == [record.room for record in telemetry.rooms.active()]
        assert telemetry.region.cells[Cell.REBASED] == telemetry.region.cells[Cell.REBASE]

    def test_two_readers_that_begin_one_after_the_other(self) -> None:
        telemetry = small_telemetry()
        for number in range(100):
            telemetry.open(number, 1)
        overrun(telemetry)
        first, second = reader_of(telemetry, asks=False), reader_of(telemetry, asks=False)
        first.catch_up()
        telemetry.flush()
        second.catch_up()
        for _ in range(6):
            telemetry.flush()
        for reader in (first, second):
            fold = reader.catch_up()
            assert fold.complete
            assert len(fold.rooms) == 100

    def test_an_answer_that_a_second_loss_has_cut_forgets_no_rooms(self) -> None:
        telemetry = small_telemetry()
        reader = reader_of(telemetry, asks=False)
        for number in range(200):
            telemetry.open(number, 1)
        reader.catch_up()
        overrun(telemetry)
        reader.catch_up()
        telemetry.flush()  # 64 rooms
        reader.catch_up()
        telemetry.flush()  # the next 64, which are lost
        overrun(telemetry)
        for _ in range(2):
            telemetry.flush()
        fold = reader.catch_up()
        assert (len(fold.rooms), fold.complete) == (200, False)
        for _ in range(4):
            telemetry.flush()
        assert (len(reader.catch_up().rooms), fold.complete) == (200, True)

    def test_a_room_that_was_opened_while_an_answer_began_is_kept(self) -> None:
        """In another thread, between taking its serial and becoming active."""
        fold = living_fold()
        for record in ((rec.BASE_BEGUN, 1, 3), (rec.OPENED, 2, 5, 6, 7), (rec.BASE_ENDED, 1)):
            fold.apply(msgspec.msgpack.encode(record))
        assert [room.serial for room in fold.rooms.active()] == [2]

    def test_a_room_that_ended_while_an_answer_was_written_stays_ended(self) -> None:
        telemetry = small_telemetry()
        record = telemetry.open(5, 1)
        overrun(telemetry)
        reader = reader_of(telemetry, asks=False)
        reader.catch_up()
        telemetry.region.append(msgspec.msgpack.encode((rec.BASE_BEGUN, 1, 2)))
        telemetry.finish(record, 5)
        record.write_base()
        telemetry.region.append(msgspec.msgpack.encode((rec.BASE_ENDED, 1)))
        fold = reader.catch_up()
        assert (fold.complete, fold.rooms.active(), len(fold.rooms.find(5))) == (True, [], 1)

    def test_transfers_of_rooms_that_ended_unseen_are_forgotten(self) -> None:
        telemetry = small_telemetry()
        reader = reader_of(telemetry)
        ending, staying = telemetry.open(1, 1), telemetry.open(2, 1)
        for record in (ending, staying):
            telemetry.transfers.begin(record.room, 100, 5)
        assert reader.catch_up().transfers.in_transfer() == {1: 100, 2: 100}
        telemetry.finish(ending, 6)
        overrun(telemetry)
        assert reader.catch_up().transfers.in_transfer() == {2: 100}

    def test_the_end_of_a_room_whose_opening_was_lost_is_kept(self) -> None:
        telemetry = small_telemetry()
        record = telemetry.open(1, 3)
        overrun(telemetry)
        telemetry.transfers.begin(1, 100, 5)
        record.first_ready_at = 4
        record.state(RoomState.SUCCESS, 9)
        telemetry.finish(record, 9)
        fold = reader_of(telemetry, asks=False).catch_up()
        assert fold.transfers.in_transfer() == {}
        assert fold.rooms.active() == []
        assert [(row["room"], row["nonce"], row["latency_ns"]) for row in fold.rooms.history(9)] == [("1", "3", 5)]


class TestRestart:
    """An observer that follows another one counts and exports no room again, and numbers events no lower."""

    @staticmethod
    def end_room(telemetry: Telemetry, number: int) -> None:
        record = telemetry.open(number, 1)
        telemetry.part(record, KEY, "decode-0", "bulk", 5, {"ready": 1, "wire": 3}, 2)
        record.state(RoomState.SUCCESS, 5)
        telemetry.finish(record, 5)

    @staticmethod
    def observations(fold: Fold) -> dict[str, int]:
        return {
            family["name"]: family["samples"][0]["count"]
            for family in fold.metrics.snapshot()
            if family["kind"] == "histogram" and family["samples"]
        }

    @pytest.mark.parametrize("late", [False, True])
    def test_rooms_count_once(self, late: bool) -> None:
        telemetry = small_telemetry()
        if late:
            overrun(telemetry)
        self.end_room(telemetry, 1)
        before = self.observations(reader_of(telemetry).catch_up())
        assert set(before.values()) == {1}
        self.end_room(telemetry, 2)
        reader, exported = reader_of(telemetry), list[int]()
        reader.fold.on_finish = lambda room: exported.append(room.room)
        fold = reader.catch_up()
        assert (self.observations(fold), exported) == (before, [2])
        assert [row["room"] for row in fold.rooms.history(9)] == ["2", "1"]
        assert fold.latencies.summary()["count"] == 2
        self.end_room(telemetry, 3)
        reader.catch_up()
        assert exported == [2, 3]

    @pytest.mark.parametrize("lost", [False, True])
    def test_numbers_of_events_never_fall(self, lost: bool) -> None:
        telemetry = small_telemetry()
        telemetry.recorder.record("test", "1")
        reader = reader_of(telemetry)
        for text in ("own 1", "own 2"):
            reader.catch_up().recorder.record("observer", text)
        telemetry.recorder.record("test", "2")
        follow = reader.catch_up().recorder.since(None, 1)["next"]
        if lost:
            overrun(telemetry)
        else:
            telemetry.recorder.record("test", "3")
        fold = reader_of(telemetry).catch_up()
        fold.recorder.record("observer", "own 3")
        found = fold.recorder.since(follow, 9)
        assert [event["text"] for event in found["events"]] == (["own 3"] if lost else ["3", "own 3"])
        assert found["dropped"] == 0

    @pytest.mark.parametrize("value", [-1, -(1 << 63), (1 << 63) - 1, 1 << 53])
    def test_damaged_cells_do_no_harm(self, value: int) -> None:
        telemetry = small_telemetry()
        self.end_room(telemetry, 1)
        telemetry.recorder.record("test", "1")
        for cell in (Cell.FOLDED, Cell.EVENTS_ADDED, Cell.EVENTS_END):
            telemetry.region.cells[cell] = value
        fold = reader_of(telemetry).catch_up()
        assert len(fold.rooms.history(9)) == 1
        fold.recorder.record("observer", "own")
        assert [event["text"] for event in fold.recorder.since(None, 9)["events"]] == ["1", "own"]
        assert faults(fold) == 0


GOOD: dict[str, tuple[Any, ...]] = {
    "opened": (rec.OPENED, 2, 5, 6, 7),
    "peers": (rec.PEERS, 1, 0, ["a"], [1]),
    "event": (rec.EVENT, 1, "grant", 5, 0, 0, (0, 4), "a", "b"),
    "part": (rec.PART, 1, (0, 0, (0, 4)), "a", "bulk", 5, {"wire": 5}, None),
    "failed": (rec.FAILED, 1, "me", "ABORTED", 5, "why", 6),
    "noted": (rec.NOTED, 0, 5, "room", "info", 7, None, "text"),
    "begun": (rec.TRANSFER_BEGUN, 7, 5, 6),
    "arrived": (rec.TRANSFER_ARRIVED, 7, "a", 5, None),
    "cancelled": (rec.TRANSFER_CANCELLED, 7, 5),
    "base": (rec.BASE_BEGUN, 1, 5),
    "base ended": (rec.BASE_ENDED, 1),
    "several": (rec.SEVERAL, ((rec.OPENED, 2, 5, 6, 7), (rec.EVENT, 2, "grant", 5, 0, 0, (0, 4), "a", "b"))),
}


def living_fold() -> Fold:
    fold = Fold("me", "decode", Clock(), **LIMITS)
    fold.apply(msgspec.msgpack.encode((rec.OPENED, 1, 7, 8, 9)))
    return fold


class TestHostileRecords:
    @pytest.mark.parametrize("name", GOOD)
    def test_good_ones_are_applied(self, name: str) -> None:
        fold = living_fold()
        fold.apply(msgspec.msgpack.encode(GOOD[name]))
        assert faults(fold) == 0

    @settings(deadline=None)
    @given(
        name=st.sampled_from(sorted(GOOD)),
        place=st.integers(0, 8),
        value=st.one_of(
            st.none(),
            st.integers(-(1 << 63), (1 << 64) - 1),
            st.text(max_size=3),
            st.floats(),
            st.lists(st.integers(-3, 3), max_size=3),
            st.dictionaries(st.text(max_size=2), st.integers(-3, 1 << 62), max_size=2),
        ),
    )
    def test_a_wrong_value_costs_its_record_at_most(self, name: str, place: int, value: Any) -> None:
        fold = living_fold()
        fields = list(GOOD[name])
        fields[place % len(fields)] = value
        fold.apply(msgspec.msgpack.encode(fields))
        records = len(value) if name == "several" and isinstance(value, list) else 1
        assert faults(fold) <= max(1, records)
        rows_can_be_shown(fold)

    @settings(deadline=None)
    @given(records=st.lists(st.binary(max_size=40), max_size=8))
    def test_garbage_is_counted(self, records: list[bytes]) -> None:
        fold = living_fold()
        for record in records:
            fold.apply(b"\xc1" + record)  # which no value begins with
            fold.apply(record)
        assert len(records) <= faults(fold) <= 2 * len(records)
        rows_can_be_shown(fold)

    def test_rooms_peers_and_paths_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvctl_agent.observer.fold._MOST_ACTIVE", 50)
        fold = living_fold()
        for number in range(100):
            fold.apply(msgspec.msgpack.encode((rec.OPENED, number + 2, number, 0, 5)))
            fold.apply(
                msgspec.msgpack.encode((rec.PART, 1, (0, 0, (0, 4)), "a", f"path-{number}", 5, {"wire": 5}, None))
            )
            fold.apply(msgspec.msgpack.encode((rec.PEERS, 1, 300 * number, ["a"] * 300, [])))
            fold.apply(msgspec.msgpack.encode((rec.TRANSFER_BEGUN, number, 5, 6)))
        assert len(fold.rooms) == len(fold.transfers) == 50
        (room,) = (room for room in fold.rooms.active() if room.serial == 1)
        assert len(room.paths) == 32
        assert len(room.peers) <= (1 << 14) + 300


def rows_can_be_shown(fold: Fold) -> None:
    fold.rooms.rows(None, 99)
    fold.rooms.detail(7)
    fold.rooms.failed(9)
    fold.recorder.since(0, 9)
    fold.stages.rows()
    fold.rate.window(1 << 40)
    fold.metrics.snapshot()
    fold.transfers.ahead(5)
