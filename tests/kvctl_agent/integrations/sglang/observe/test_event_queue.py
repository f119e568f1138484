"""What an event queue does with events, waits and documents, and on whose thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.integrations.sglang.observe.event_queue import EventQueue
from kvctl_agent.integrations.sglang.observe.tracker import Tracker
from kvctl_agent.observer import documents as doc
from kvctl_agent.observer.documents import Builder
from kvctl_agent.telemetry.region import Cell, Document, MemoryReader
from tests.kvctl_agent.integrations.sglang.observe.test_tracker import MS, SUCCESS, WAITING, counter, row, rows, tracker
from tests.support.folded import folded

KEY = (7, 0, "10.0.0.2:5")


def state() -> Iterator[Mapping[str, Any]]:
    yield {"state": "running"}


def opened(queue: EventQueue, build: Builder = state) -> Tracker:
    made = tracker("prefill", waits=queue.waits)
    queue.open(made, DocumentPublisher(made.telemetry.region, {Document.STATE: build}))
    return made


def test_events_from_before_the_rank_is_observed_are_its_first() -> None:
    queue = EventQueue()
    queue.add(Tracker.status_changed, 1, 7, WAITING)
    queue.publish()  # nothing is there yet
    seen = opened(queue)
    queue.add(Tracker.status_changed, 2, 7, SUCCESS)
    queue.publish()
    assert row(seen)["state"] == "Success"


def test_events_wait_for_a_turn_or_for_an_event_10_ms_after_the_latest_were_applied() -> None:
    queue = EventQueue()
    seen = opened(queue)
    queue.add(Tracker.status_changed, time.monotonic_ns(), 7, WAITING)
    assert row(seen)["state"] == "WaitingForInput"
    written = seen.telemetry.region.cells[Cell.WRITTEN]
    queue.add(Tracker.begun, 2, 7, 4)
    queue.add(Tracker.chunk_ready, 3, 7, 0, True)
    assert seen.telemetry.region.cells[Cell.WRITTEN] == written
    queue.add(Tracker.status_changed, time.monotonic_ns() + 10 * MS, 7, SUCCESS)
    assert (row(seen)["state"], row(seen)["pages"]) == ("Success", 4)
    queue.add(Tracker.cleared, 5, 7)
    assert seen.rooms
    queue.publish()
    assert not seen.rooms


@pytest.mark.parametrize("room", [None, "7", object()], ids=["none", "text", "object"])
def test_an_event_that_cannot_be_applied_costs_itself_alone(room: Any) -> None:
    queue = EventQueue()
    seen = opened(queue)
    queue.add(Tracker.status_changed, 1, room, WAITING)
    queue.add(Tracker.status_changed, 1, 7, WAITING)
    queue.publish()
    assert row(seen)["state"] == "WaitingForInput"
    assert counter(seen, "kvctl_internal_errors_total") == 1
    assert "an event was lost: TypeError" in folded(seen.telemetry).recorder.since(None, 9)["events"][-1]["text"]


def test_telemetry_that_cannot_be_written_is_logged_once_and_reaches_no_hook(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise ValueError("closed")

    queue = EventQueue()
    seen = opened(queue)
    with caplog.at_level(logging.ERROR, "kvctl"), monkeypatch.context() as patched:
        patched.setattr(seen.telemetry, "flush", fails)
        for _ in range(3):
            queue.add(Tracker.status_changed, time.monotonic_ns() + 60_000 * MS, 7, WAITING)
    expected = "kvctl: events of SGLang are not shown: ValueError: closed"
    assert [record.getMessage() for record in caplog.records] == [expected]
    queue.publish()
    assert row(seen)["state"] == "WaitingForInput"


@pytest.mark.parametrize("room", [2**70, "7\udcff"], ids=["large", "surrogate"])
def test_a_number_that_no_room_can_have_costs_its_records_alone(room: Any) -> None:
    queue = EventQueue()
    seen = opened(queue)
    queue.add(Tracker.status_changed, 1, room, WAITING)
    queue.add(Tracker.status_changed, 1, 7, WAITING)
    queue.publish()
    assert [found["room"] for found in folded(seen.telemetry).rooms.rows(None, 9)] == ["7"]


def test_events_that_find_no_space_are_counted() -> None:
    queue = EventQueue()
    for number in range(4096 + 5):
        queue.add(Tracker.status_changed, 1, 7, SUCCESS if number < 4096 else WAITING)
    seen = opened(queue)
    assert counter(seen, "kvctl_internal_errors_total") == 5
    assert "5 events were lost" in folded(seen.telemetry).recorder.since(None, 9)["events"][-1]["text"]


def test_many_events_do_not_wait_for_a_turn() -> None:
    queue = EventQueue()
    seen = opened(queue)
    queue.add(Tracker.status_changed, time.monotonic_ns() + 60_000 * MS, 7, WAITING)
    for _ in range(5000):
        queue.add(Tracker.parked, 1, 7)
    assert len(queue._events) <= 1024
    assert counter(seen, "kvctl_internal_errors_total") == 0


def test_a_thread_leaves_its_event_to_the_one_that_is_at_them() -> None:
    queue = EventQueue()
    seen, inside, go_on = opened(queue), threading.Event(), threading.Event()

    def hold(_: Tracker, __: int) -> None:
        inside.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=queue.add, args=(hold, 1))
    thread.start()
    assert inside.wait(60)
    queue.add(Tracker.status_changed, 1, 7, WAITING)  # does not wait
    queue.publish()
    assert rows(seen) == []
    go_on.set()
    thread.join()
    assert row(seen)["state"] == "WaitingForInput"


def test_a_chunk_waits_from_its_first_event_until_it_may_be_written_or_its_room_ends() -> None:
    queue = EventQueue()
    seen = opened(queue)
    queue.add(Tracker.status_changed, 1, 7, WAITING)
    queue.wait(2, KEY, 2, 0, -1)
    queue.wait(3, KEY, 2, 1, 64)
    queue.wait(3, (7, 1, KEY[2]), 2, 0, -1)
    queue.publish()
    assert (queue.waits[KEY].since_ns, queue.waits[KEY].end) == (2, 64)
    assert row(seen)["parked"] == 2
    assert queue.wait_over(KEY)
    assert not queue.wait_over(KEY)
    queue.publish()
    assert row(seen)["parked"] == 1
    queue.add(Tracker.status_changed, 4, 8, WAITING)
    queue.wait(4, (8, 1, KEY[2]), 2, 0, -1)
    queue.forget_waits(7)
    assert {room for room, *_ in queue.waits} == {8}


def test_a_chunk_of_a_room_that_has_ended_does_not_wait() -> None:
    """A transfer worker may come to it after the scheduler has given the room up."""
    queue = EventQueue()
    opened(queue)
    queue.add(Tracker.status_changed, 1, 7, WAITING)
    queue.forget_waits(7)
    queue.add(Tracker.cleared, 2, 7)
    queue.wait(3, KEY, 2, 0, -1)
    queue.publish()
    assert not queue.waits


def test_documents_that_are_due_are_written_in_a_turn() -> None:
    queue = EventQueue()
    seen = opened(queue)
    documents = doc.RegionDocuments(MemoryReader(seen.telemetry.region))
    assert documents.read(Document.STATE, doc.State).state == ""
    queue.publish()
    assert documents.read(Document.STATE, doc.State).state == "running"


def test_a_document_that_cannot_be_built_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Iterator[Mapping[str, Any]]:
        raise AttributeError("no such table")

    queue = EventQueue()
    seen = opened(queue, fails)
    reader = MemoryReader(seen.telemetry.region)
    with caplog.at_level(logging.ERROR, "kvctl"):
        for _ in range(3):
            reader.ask(Cell.WANTED)
            queue.flush()
            queue.add(Tracker.status_changed, 1, 7, WAITING)
    assert [record.getMessage() for record in caplog.records] == [
        "kvctl: the state of SGLang's objects is not shown: AttributeError: no such table"
    ]
    assert row(seen)["state"] == "WaitingForInput"
