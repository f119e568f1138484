"""The writer's side: what an agent's threads record is in its region, and costs them no wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.telemetry import records as rec
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.metrics import OTHER
from kvctl_agent.telemetry.region import MOST_RECORD_BYTES, Cell, Document, MemoryReader
from tests.support.folded import folded


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry("prefill-0", "prefill")


def written(telemetry: Telemetry) -> list[tuple[int, tuple[Any, ...]]]:
    """Everything in the log: kinds and fields."""
    return [rec.decode(record) for record in MemoryReader(telemetry.region).records().records]


class TestRooms:
    @pytest.mark.parametrize("field", ["planned", "sent", "parked", "tokens", "pages", "forward_done_at", "request_id"])
    def test_a_field_that_changes_is_written_once_by_the_next_flush(self, telemetry: Telemetry, field: str) -> None:
        record = telemetry.open(7, 1)
        value: Any = "cmpl-1" if field == "request_id" else 5
        setattr(record, field, value)
        setattr(record, field, value)
        assert [kind for kind, _ in written(telemetry)] == [rec.OPENED]
        telemetry.flush()
        telemetry.flush()
        _, (kind, values) = written(telemetry)
        assert kind == rec.ROOM
        assert dict(zip(rec.ROOM_FIELDS, values, strict=True))[field] == value

    def test_events_parts_and_ends_are_written_at_once(self, telemetry: Telemetry) -> None:
        record = telemetry.open(7, 1)
        record.event("accept", 1, peer="decode-0")
        telemetry.part(record, (0, 0, (0, 4)), "decode-0", "bulk", 5, {"ready": 1, "wire": 2}, 3)
        record.fail({"rank": "decode-0", "code": "ABORTED", "at_ns": 5, "text": "aborted"}, 4)
        record.state(RoomState.FAILED, 5)
        telemetry.finish(record, 6)
        kinds = [kind for kind, _ in written(telemetry)]
        assert kinds == [rec.OPENED, rec.EVENT, rec.PART, rec.FAILED, rec.FINISHED]
        telemetry.flush()
        assert len(written(telemetry)) == len(kinds)  # nothing was left to write

    def test_the_same_room_and_nonce_twice_is_a_mistake(self, telemetry: Telemetry) -> None:
        telemetry.open(7, 1)
        telemetry.open(7, 2)
        with pytest.raises(ValueError, match="room 7 with nonce 1 is already open"):
            telemetry.open(7, 1)

    def test_the_end_of_a_room_counts_once(self, telemetry: Telemetry) -> None:
        record = telemetry.open(7, 1)
        record.first_ready_at = 3
        record.state(RoomState.SUCCESS, 5)
        for now in (5, 9):
            telemetry.finish(record, now)
        assert telemetry.metrics.total("kvctl_rooms_finished_total") == 1
        assert len(telemetry.rooms) == 0

    def test_peers_of_any_number_fit(self, telemetry: Telemetry) -> None:
        record = telemetry.open(7, 0)
        names = [f"decode-{number}-{'x' * 100}" for number in range(1000)]
        record.expect(names)
        record.join("another", 5)
        record.join("one more", 6)
        record.leave("another", 5)
        (room,) = folded(telemetry).rooms.active()
        assert (room.peers, room.nonces) == ([*names, "one more"], [6])
        assert telemetry.region.cells[Cell.TOO_LARGE] == 0


@pytest.mark.parametrize("text", ["\ud800", "plain \udfff"])
def test_a_text_that_cannot_be_encoded_is_escaped(telemetry: Telemetry, text: str) -> None:
    telemetry.recorder.record("room", text, peer=text)
    telemetry.open(1, 1).expect([text])
    fold = folded(telemetry)
    assert "\\ud" in fold.recorder.since(None, 1)["events"][0]["text"]
    assert "\\ud" in fold.rooms.active()[0].peers[0]


class TestCollected:
    def test_records_wait_for_a_flush_which_writes_them_together_in_their_order(self) -> None:
        telemetry = Telemetry("decode-0", "decode")
        telemetry.collected = []
        record = telemetry.open(7, 9, 5)
        record.event("open", 6)
        record.pages = 4
        assert telemetry.region.cells[Cell.WRITTEN] == 0
        telemetry.flush()
        ((kind, (records,)),) = written(telemetry)
        assert kind == rec.SEVERAL
        assert [rec.decode(each)[0] for each in records] == [rec.OPENED, rec.EVENT, rec.ROOM]
        telemetry.finish(record, 8)
        (found,) = folded(telemetry).rooms.history(9)
        assert found["room"] == "7"

    @pytest.mark.parametrize("text", ["x" * (MOST_RECORD_BYTES - 60), "\udcff"], ids=["large", "surrogate"])
    def test_one_that_does_not_fit_with_others_or_cannot_be_encoded_is_written_by_itself(self, text: str) -> None:
        telemetry = Telemetry("decode-0", "decode")
        telemetry.collected = []
        for number in range(100):
            telemetry.recorder.record("room", text if number == 50 else str(number))
        events = folded(telemetry).recorder.since(None, 200)["events"]
        assert [event["text"] for event in events if len(event["text"]) < 3] == [
            *(str(number) for number in range(50)), *(str(number) for number in range(51, 100))
        ]  # fmt: skip
        assert len(events) == 100


class TestWhatCannotBeEncoded:
    """It is counted, and stops neither the caller nor the control loop."""

    @pytest.mark.parametrize("value", [object(), 1 << 70, 1j])
    def test_a_record(self, telemetry: Telemetry, value: Any) -> None:
        telemetry.recorder.record("event", value)
        telemetry.recorder.record("event", "\ud800", peer=value)
        assert (written(telemetry), telemetry.region.cells[Cell.TOO_LARGE]) == ([], 2)

    def test_a_value_of_a_room(self, telemetry: Telemetry) -> None:
        wrong, right = telemetry.open(1, 1), telemetry.open(2, 1)
        wrong.tokens, right.tokens = object(), 5  # type: ignore[assignment]
        telemetry.flush()
        assert [room.tokens for room in folded(telemetry).rooms.active()] == [None, 5]
        telemetry.region.cells[Cell.REBASE] = 1
        telemetry.flush()
        assert telemetry.region.cells[Cell.REBASED] == 1
        assert telemetry.region.cells[Cell.TOO_LARGE] == 2
        assert [room.tokens for room in folded(telemetry).rooms.active()] == [5]

    def test_integers_of_numpy_are_converted(self, telemetry: Telemetry) -> None:
        record = telemetry.open(1, 1)
        record.tokens, record.pages = np.int64(5), np.uint8(3)  # type: ignore[assignment]
        (room,) = folded(telemetry).rooms.active()
        assert (room.tokens, room.pages, telemetry.region.cells[Cell.TOO_LARGE]) == (5, 3, 0)

    def test_a_label(self, telemetry: Telemetry) -> None:
        telemetry.metrics.add("kvctl_parts_total", 1, "bulk")
        telemetry.metrics.add("kvctl_room_failures_total", 2, "\ud800")
        telemetry.metrics.series.append(("kvctl_parts_total", (object(),)))  # type: ignore[arg-type]
        telemetry.metrics.add("kvctl_parts_total", 3, "slice")
        metrics = folded(telemetry).metrics
        assert metrics.totals("kvctl_parts_total")["bulk",] == 1
        assert metrics.totals("kvctl_room_failures_total") == {("\\ud800",): 2}
        assert telemetry.region.cells[Cell.TOO_LARGE] == 1


class TestCounters:
    def test_no_count_is_lost_between_threads(self, telemetry: Telemetry, switching: None) -> None:
        in_threads(4, lambda: [telemetry.metrics.add("kvctl_parts_total", 1, "bulk") for _ in range(5000)])
        assert telemetry.metrics.total("kvctl_parts_total", "bulk") == 20_000
        assert folded(telemetry).metrics.totals("kvctl_parts_total") == {("bulk",): 20_000}

    def test_new_series_of_several_threads_are_all_named(self, telemetry: Telemetry, switching: None) -> None:
        def work() -> None:
            name = threading.current_thread().name
            for number in range(200):
                telemetry.metrics.add("kvctl_room_failures_total", 1, f"{name}-{number}")
                telemetry.flush()

        in_threads(4, work)
        assert folded(telemetry).metrics.totals("kvctl_room_failures_total") == telemetry.metrics.totals(
            "kvctl_room_failures_total"
        )
        assert len(telemetry.metrics.totals("kvctl_room_failures_total")) == 800

    @pytest.mark.parametrize(
        "code", ["code-{}", "code-{}-" + "x" * 500, "{}-" + "\U0001f600" * 90], ids=["short", "long", "wide"]
    )
    def test_labels_that_peers_invent_fill_neither_memory_nor_document(self, telemetry: Telemetry, code: str) -> None:
        for number in range(5000):
            telemetry.metrics.add("kvctl_room_failures_total", 1, code.format(number))
        for metrics in (telemetry.metrics, folded(telemetry).metrics):
            assert metrics.total("kvctl_room_failures_total") == 5000
            assert metrics.total("kvctl_room_failures_total", OTHER) > 3900
        assert telemetry.region.cells[Cell.TOO_LARGE] == 0

    def test_a_document_of_counters_that_is_no_such_thing_costs_the_counters(self, telemetry: Telemetry) -> None:
        telemetry.metrics.add("kvctl_parts_total", 1, "bulk")
        fold = folded(telemetry)
        for value in (b"", b"\xc1", msgspec.msgpack.encode([["kvctl_parts_total", []], ["nonsense", ["bulk"]]])):
            telemetry.region.publish(Document.COUNTERS, value, 5)
            assert folded(telemetry) is fold
            assert fold.metrics.totals("kvctl_parts_total") == {}
        for damage in (-1.0, float("nan"), float("inf")):
            telemetry.region.counters[0] = damage
            telemetry.region.publish(Document.COUNTERS, msgspec.msgpack.encode([["kvctl_parts_total", ["bulk"]]]), 5)
            assert folded(telemetry).metrics.totals("kvctl_parts_total") == {}


def test_values_that_change_while_another_thread_flushes_are_written(telemetry: Telemetry, switching: None) -> None:
    """Readers in the process flush, too; whichever flush comes last has the last value."""
    records = [telemetry.open(number, 1) for number in range(3)]
    ending = threading.Event()

    def flush() -> None:
        while not ending.is_set():
            telemetry.flush(wait=True)

    flusher = threading.Thread(target=flush)
    flusher.start()
    for value in range(3000):
        for record in records:
            record.planned = value
        telemetry.flush()
    ending.set()
    flusher.join()
    telemetry.flush()
    assert [room.planned for room in folded(telemetry).rooms.active()] == [2999] * 3


def in_threads(count: int, work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_signal_handler_may_record_while_its_thread_does(telemetry: Telemetry) -> None:
    """Such as one that closes the agent: a lock that its own thread holds would stop it for good."""
    with telemetry.recorder._numbering, telemetry.metrics._adding, telemetry._flushing:
        telemetry.recorder.record("close", "by a signal")
        telemetry.finish(telemetry.open(7, 1), 5)
        telemetry.flush(wait=True)
    assert folded(telemetry).metrics.total("kvctl_rooms_finished_total") == 1
