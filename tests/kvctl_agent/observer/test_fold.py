"""What an agent writes is what the fold of its region shows."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl_agent.contract.snapshots import RoomRow
from kvctl_agent.contract.states import RoomState
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.room_records import RoomRecord
from tests.support.folded import folded

MS = 1_000_000


def sent(telemetry: Telemetry, record: RoomRecord, group: int, ready: int, wire: int, done: int | None) -> None:
    """One part of layer group `group`; times in ms."""
    moments = {"ready": ready * MS, "post": (wire - 1) * MS, "wire": wire * MS}
    layers = (8 * group, 8 * group + 8)
    telemetry.part(record, (0, 0, layers), "decode-0", "bulk", 100, moments, (wire if done is None else done) * MS)


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry("prefill-0", "prefill")


def row_of(telemetry: Telemetry) -> RoomRow:
    (row,) = folded(telemetry).rooms.rows(None, 2)
    return row


def metric(telemetry: Telemetry, name: str) -> Any:
    (family,) = (family for family in folded(telemetry).metrics.snapshot() if family["name"] == name)
    return family["samples"]


class TestAPipelinedRoom:
    """Groups ready at 10, 20 and 30 ms, when the forward is done; each is on its way for 15 ms."""

    @pytest.fixture
    def record(self, telemetry: Telemetry) -> RoomRecord:
        record = telemetry.open(7, 1)
        sent(telemetry, record, 0, 10, 25, done=None)  # the forward still runs
        record.forward_done_at = 30 * MS
        sent(telemetry, record, 1, 20, 35, 30)
        sent(telemetry, record, 2, 30, 45, 30)
        return record

    def test_what_was_hidden_and_what_was_exposed_counts_overlaps_once(
        self, telemetry: Telemetry, record: RoomRecord
    ) -> None:
        row = row_of(telemetry)
        assert (row["hidden_ns"], row["exposed_ns"]) == (20 * MS, 15 * MS)
        assert row["forward_done_at_ns"] == telemetry.clock.wall_ns(30 * MS)

    def test_by_layer_group(self, telemetry: Telemetry, record: RoomRecord) -> None:
        found = folded(telemetry).stages.rows()
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
    record = telemetry.open(7, 1)
    sent(telemetry, record, 0, 10, 25, done=None)
    row = row_of(telemetry)
    assert (row["hidden_ns"], row["exposed_ns"], row["forward_done_at_ns"]) == (15 * MS, 0, None)
    (group,) = folded(telemetry).stages.rows()
    assert (group["exposed_ns"], group["overlapped_ns"]) == (0, 15 * MS)


def test_before_anything_was_sent_nothing_is_claimed(telemetry: Telemetry) -> None:
    telemetry.open(7, 1)
    row = row_of(telemetry)
    assert (row["hidden_ns"], row["exposed_ns"]) == (None, None)


def test_a_decode_rank_knows_of_no_forward() -> None:
    telemetry = Telemetry("decode-0", "decode")
    record = telemetry.open(7, 1)
    telemetry.part(record, (0, 0, (0, 8)), "prefill-0", "staged", 100, {"arrive": MS, "scatter": 3 * MS})
    row = row_of(telemetry)
    assert (row["hidden_ns"], row["exposed_ns"]) == (None, None)
    (group,) = folded(telemetry).stages.rows()
    assert (group["exposed_ns"], group["overlapped_ns"]) == (None, None)
    assert group["stages"]["ready"]["count"] == 0


def test_each_chunk_begins_anew(telemetry: Telemetry) -> None:
    record = telemetry.open(7, 1)
    for chunk, start in ((0, 10), (1, 500)):
        for group in range(2):
            moments = {"ready": (start + 5 * group) * MS, "wire": 600 * MS}
            telemetry.part(record, (0, chunk, (group, group + 1)), "decode-0", "bulk", 1, moments, 600 * MS)
    second = folded(telemetry).stages.rows()[1]
    assert second["stages"]["ready"]["p99_ns"] == pytest.approx(5 * MS, rel=1 / 32)


def test_a_reader_counts_bytes_over_the_time_in_which_it_waited_for_them() -> None:
    telemetry = Telemetry("decode-0", "decode")
    record = telemetry.open(7, 1)
    begin = record.opened_at
    for number, arrived in enumerate((10, 12, 12, 20)):  # ms; written into the pages: one moment is all that is seen
        layers = (number, number + 1)
        telemetry.part(record, (0, 0, layers), "prefill-0", "direct", 50_000, {"arrive": begin + arrived * MS})
    window = folded(telemetry).rate.window(begin + 30 * MS)
    assert window["bytes"] == 200_000
    assert window["gb_per_s"] == pytest.approx(200_000 / (20 * MS))


class TestReaders:
    """Everything that is computed from parts and ends of rooms."""

    PART = (0, 0, (0, 8)), "decode-0", "bulk", 100, {"queue": MS, "post": 2 * MS, "wire": 3 * MS}, 3 * MS

    def test_parts(self, telemetry: Telemetry) -> None:
        record = telemetry.open(7, 1)
        for number in (1, 2, 3):
            telemetry.part(record, *self.PART)
            fold = folded(telemetry)
            assert fold.stages.rows()[0]["parts"] == number
            assert fold.rate.window(4 * MS)["bytes"] == 100 * number
            assert fold.metrics.total("kvctl_parts_total") == telemetry.metrics.total("kvctl_parts_total") == number
            assert fold.metrics.totals("kvctl_part_bytes_total")["bulk",] == 100 * number
            assert metric(telemetry, "kvctl_stage_seconds")[0]["count"] == number
            row = row_of(telemetry)
            assert (row["parts"], row["bytes"], row["paths"]) == (number, 100 * number, {"bulk": number})

    def test_counters_that_come_within_an_answer_are_in_the_next_one(self, telemetry: Telemetry) -> None:
        """An answer reads the counters when it needs them first, here after `slice` has come."""
        record = telemetry.open(7, 1)
        telemetry.part(record, *self.PART)
        answer = folded(telemetry).metrics
        for path in ("slice", "staged"):
            telemetry.part(record, (0, 0, (0, 8)), "decode-0", path, 100, {"wire": 1}, 0)
            telemetry.flush(wait=True)
            assert answer.total("kvctl_parts_total") == 2
        assert folded(telemetry).metrics.total("kvctl_parts_total") == 3

    def test_rooms(self, telemetry: Telemetry) -> None:
        for number in (1, 2):
            record = telemetry.open(number, 1)
            telemetry.part(record, (0, 0, (0, 8)), "decode-0", "bulk", 100, {"ready": 40 * MS, "wire": 45 * MS}, 0)
            record.state(RoomState.SUCCESS, 50 * MS)
            telemetry.finish(record, 50 * MS)
            fold = folded(telemetry)
            assert fold.recent_ends.counts(100 * MS)["Success"] == number
            assert fold.latencies.summary() == {
                **dict.fromkeys(("p50_ns", "p90_ns", "p99_ns"), 10 * MS),
                "count": number,
            }
            assert fold.rate.window(100 * MS)["rooms_per_s"] == pytest.approx(number / 10)
            assert fold.metrics.total("kvctl_rooms_finished_total") == number
            assert metric(telemetry, "kvctl_room_seconds")[0]["count"] == number
            assert [row["room"] for row in fold.rooms.history(9)] == [str(each) for each in range(number, 0, -1)]
            assert telemetry.rooms.active() == fold.rooms.active() == []
