"""One part told once reaches everything that remembers it; a room's hidden and exposed transfer add up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.telemetry.hub import StageTimes, Telemetry, room_rows
from kvctl_agent.telemetry.metrics import Metrics
from kvctl_agent.telemetry.room_records import RoomRecord

MS = 1_000_000


def sent(telemetry: Telemetry, record: RoomRecord, group: int, ready: int, wire: int, done: int | None) -> None:
    """One part of layer group `group`; times in ms."""
    moments = {"ready": ready * MS, "post": (wire - 1) * MS, "wire": wire * MS}
    layers = (8 * group, 8 * group + 8)
    telemetry.part(record, (0, 0, layers), "decode-0", "bulk", 100, moments, (wire if done is None else done) * MS)


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry("prefill-0", "prefill", history=8, timeline_events=64, recorder_events=16)


def metric(telemetry: Telemetry, name: str) -> Any:
    (family,) = (family for family in telemetry.metrics.snapshot() if family["name"] == name)
    return family["samples"]


class TestAPipelinedRoom:
    """Groups ready at 10, 20 and 30 ms, when the forward is done; each is on its way for 15 ms."""

    @pytest.fixture
    def record(self, telemetry: Telemetry) -> RoomRecord:
        record = telemetry.rooms.open(7, 1)
        sent(telemetry, record, 0, 10, 25, done=None)  # the forward still runs
        record.forward_done_at = 30 * MS
        sent(telemetry, record, 1, 20, 35, 30)
        sent(telemetry, record, 2, 30, 45, 30)
        return record

    def test_what_was_hidden_and_what_was_exposed_counts_overlaps_once(
        self, telemetry: Telemetry, record: RoomRecord
    ) -> None:
        row = telemetry.rooms.row(record)
        assert (row["hidden_ns"], row["exposed_ns"]) == (20 * MS, 15 * MS)
        assert row["forward_done_at_ns"] == telemetry.clock.wall_ns(30 * MS)

    @pytest.mark.parametrize("rows", ["aggregated", "of the room"])
    def test_by_layer_group(self, telemetry: Telemetry, record: RoomRecord, rows: str) -> None:
        found = telemetry.stages.rows() if rows == "aggregated" else room_rows([record], telemetry.clock, "prefill-0")
        assert [(row["layers"], row["exposed_ns"], row["overlapped_ns"]) for row in found] == [
            ([0, 8], 0, 15 * MS),
            ([8, 16], 5 * MS, 10 * MS),
            ([16, 24], 15 * MS, 0),
        ]
        ready = [row["stages"]["ready"]["p50_ns"] for row in found]  # one group's compute apart
        assert ready == [0, pytest.approx(10 * MS, rel=1 / 32), pytest.approx(20 * MS, rel=1 / 32)]

    def test_a_room_that_succeeded_is_counted(self, telemetry: Telemetry, record: RoomRecord) -> None:
        record.state(RoomState.SUCCESS, 50 * MS)
        telemetry.finish(record, 50 * MS)
        for name, seconds in (("hidden", 0.020), ("exposed", 0.015)):
            (sample,) = metric(telemetry, f"kvctl_transfer_{name}_seconds")
            assert (sample["count"], sample["sum"]) == (1, pytest.approx(seconds))

    def test_a_room_that_failed_is_not(self, telemetry: Telemetry, record: RoomRecord) -> None:
        record.state(RoomState.FAILED, 50 * MS)
        telemetry.finish(record, 50 * MS)
        assert metric(telemetry, "kvctl_transfer_exposed_seconds") == []


def test_while_the_forward_runs_all_that_was_sent_is_hidden(telemetry: Telemetry) -> None:
    record = telemetry.rooms.open(7, 1)
    sent(telemetry, record, 0, 10, 25, done=None)
    row = telemetry.rooms.row(record)
    assert (row["hidden_ns"], row["exposed_ns"], row["forward_done_at_ns"]) == (15 * MS, 0, None)
    (group,) = room_rows([record], telemetry.clock, "prefill-0")
    assert (group["exposed_ns"], group["overlapped_ns"]) == (0, 15 * MS)


def test_before_anything_was_sent_nothing_is_claimed(telemetry: Telemetry) -> None:
    row = telemetry.rooms.row(telemetry.rooms.open(7, 1))
    assert (row["hidden_ns"], row["exposed_ns"]) == (None, None)


def test_a_decode_rank_knows_of_no_forward() -> None:
    telemetry = Telemetry("decode-0", "decode", history=8, timeline_events=64, recorder_events=16)
    record = telemetry.rooms.open(7, 1)
    telemetry.part(record, (0, 0, (0, 8)), "prefill-0", "staged", 100, {"arrive": MS, "scatter": 3 * MS})
    row = telemetry.rooms.row(record)
    assert (row["hidden_ns"], row["exposed_ns"]) == (None, None)
    for rows in (telemetry.stages.rows(), room_rows([record], telemetry.clock, "decode-0")):
        assert (rows[0]["exposed_ns"], rows[0]["overlapped_ns"]) == (None, None)
        assert rows[0]["stages"]["ready"]["count"] == 0


def test_each_chunk_begins_anew(telemetry: Telemetry) -> None:
    record = telemetry.rooms.open(7, 1)
    for chunk, start in ((0, 10), (1, 500)):
        for group in range(2):
            moments = {"ready": (start + 5 * group) * MS, "wire": 600 * MS}
            telemetry.part(record, (0, chunk, (group, group + 1)), "decode-0", "bulk", 1, moments, 600 * MS)
    second = telemetry.stages.rows()[1]
    assert second["stages"]["ready"]["p99_ns"] == pytest.approx(5 * MS, rel=1 / 32)


def test_a_reader_counts_bytes_over_the_time_in_which_it_waited_for_them() -> None:
    telemetry = Telemetry("decode-0", "decode", history=8, timeline_events=64, recorder_events=16)
    record = telemetry.rooms.open(7, 1)
    begin = record.opened_at
    for number, arrived in enumerate((10, 12, 12, 20)):  # ms; written into the pages: one moment is all that is seen
        layers = (number, number + 1)
        telemetry.part(record, (0, 0, layers), "prefill-0", "direct", 50_000, {"arrive": begin + arrived * MS})
    window = telemetry.rate.window(begin + 30 * MS)
    assert window["bytes"] == 200_000
    assert window["gb_per_s"] == pytest.approx(200_000 / (20 * MS))


class TestNotes:
    """What is noted is counted later, at the latest when somebody reads it."""

    PART = (0, 0, (0, 8)), "decode-0", "bulk", 100, {"queue": MS, "post": 2 * MS, "wire": 3 * MS}, 3 * MS

    @pytest.mark.parametrize(
        "read",
        [
            lambda telemetry: telemetry.stages.rows()[0]["parts"],
            lambda telemetry: telemetry.rate.window(4 * MS)["bytes"] / 100,
            lambda telemetry: telemetry.metrics.total("kvctl_parts_total"),
            lambda telemetry: telemetry.metrics.totals("kvctl_part_bytes_total")["bulk",] / 100,
            lambda telemetry: metric(telemetry, "kvctl_stage_seconds")[0]["count"],
        ],
    )
    def test_every_reader_counts_the_parts(self, telemetry: Telemetry, read: Callable[[Telemetry], float]) -> None:
        record = telemetry.rooms.open(7, 1)
        for number in range(1, 70):  # also more than are ever kept
            telemetry.part(record, *self.PART)
            if number in (3, 69):
                assert read(telemetry) == number

    @pytest.mark.parametrize(
        "read",
        [
            lambda telemetry: telemetry.recent_ends.counts(100 * MS)["Success"],
            lambda telemetry: telemetry.latencies.summary()["count"],
            lambda telemetry: telemetry.latencies.after(0)[1],
            lambda telemetry: round(telemetry.rate.window(100 * MS)["rooms_per_s"] * 10),  # in ten seconds
            lambda telemetry: telemetry.metrics.total("kvctl_rooms_finished_total"),
            lambda telemetry: metric(telemetry, "kvctl_room_seconds")[0]["count"],
        ],
    )
    def test_every_reader_counts_the_rooms(self, telemetry: Telemetry, read: Callable[[Telemetry], float]) -> None:
        for number in (1, 2):
            record = telemetry.rooms.open(number, 1)
            record.event("ready", 40 * MS)
            record.state(RoomState.SUCCESS, 50 * MS)
            telemetry.finish(record, 50 * MS)
            assert read(telemetry) == number

    @pytest.mark.parametrize("where", [(StageTimes, "add"), (Metrics, "_add"), (Metrics, "_observe")])
    def test_nobody_who_must_not_wait_waits_for_a_reader(
        self, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
    ) -> None:
        record = telemetry.rooms.open(7, 1)
        telemetry.part(record, *self.PART)
        reading, go_on, count = threading.Event(), threading.Event(), getattr(*where)

        def slowly(*args: Any) -> None:
            if threading.current_thread() is reader:
                reading.set()
                assert go_on.wait(10)
            count(*args)

        monkeypatch.setattr(*where, slowly)
        reader = threading.Thread(target=telemetry.count_pending)
        reader.start()
        assert reading.wait(10)
        for _ in range(200):
            telemetry.part(record, *self.PART)
            telemetry.count_pending(1)
            telemetry.metrics.add("kvctl_rooms_opened_total", 1)
        assert record.parts == 201
        assert telemetry.counted_latencies.summary()["count"] == 0
        assert telemetry.metrics.counted("kvctl_rooms_opened_total") == {(): 200}
        go_on.set()
        reader.join()
        assert telemetry.stages.rows()[0]["parts"] == telemetry.metrics.total("kvctl_parts_total") == 201

    def test_who_must_not_take_long_counts_only_the_oldest(self, telemetry: Telemetry) -> None:
        record = telemetry.rooms.open(7, 1)
        for _ in range(5):
            telemetry.part(record, *self.PART)
        for counted, least, most in ((0, 6, 2), (2, 2, 2), (4, 2, 2), (4, 2, 2), (5, 1, 2)):
            telemetry.count_pending(least, most)
            assert telemetry.metrics.counted("kvctl_parts_total").get(("bulk",), 0) == counted

    def test_an_error_while_counting_costs_one_note(
        self, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        record = telemetry.rooms.open(7, 1)
        for _ in range(3):
            telemetry.part(record, *self.PART)
        calls, count = iter(range(3)), StageTimes.add

        def add(*args: Any) -> None:
            if next(calls) == 1:
                raise ZeroDivisionError
            count(*args)

        monkeypatch.setattr(StageTimes, "add", add)
        with pytest.raises(ZeroDivisionError):
            telemetry.count_pending()
        assert telemetry.stages.rows()[0]["parts"] == 2

    def test_threads_that_note_and_read_at_once_lose_nothing(self, telemetry: Telemetry) -> None:
        record, parts = telemetry.rooms.open(7, 1), 5_000

        def note() -> None:
            for _ in range(parts):
                telemetry.part(record, *self.PART)

        writers = [threading.Thread(target=note) for _ in range(2)]
        for writer in writers:
            writer.start()
        seen = 0.0
        while any(writer.is_alive() for writer in writers):
            before, seen = seen, telemetry.metrics.total("kvctl_parts_total")
            assert before <= seen
        assert telemetry.metrics.total("kvctl_parts_total") == telemetry.stages.rows()[0]["parts"] == 2 * parts
