"""A reader of the flight recorder knows what it has seen, what is new, and how much it missed."""

from __future__ import annotations

import pytest

from kvctl_agent.contract.snapshots import Events
from kvctl_agent.observer.flight_recorder import RecordedEvents
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import Entry


def recorder(entries: int, capacity: int = 10) -> RecordedEvents:
    made = RecordedEvents(Clock(), "decode-0", capacity)
    for number in range(entries):
        made.record("test", f"number {number}")
    return made


def numbers(events: Events) -> list[int]:
    return [event["sequence"] for event in events["events"]]


def test_an_entry_keeps_what_was_said() -> None:
    made = recorder(0)
    made.record("room", "timed out", severity="error", room=2**64 - 1, peer="prefill-0")
    (event,) = made.since(0, 10)["events"]
    assert event["at_ns"] > 1_600_000_000_000_000_000
    assert {**event, "at_ns": 0} == {
        "sequence": 0,
        "at_ns": 0,
        "agent": "decode-0",
        "kind": "room",
        "severity": "error",
        "room": "18446744073709551615",
        "peer": "prefill-0",
        "text": "timed out",
    }


def test_an_entry_may_be_about_an_earlier_time() -> None:
    made = recorder(0)
    for at_ns in (5, 7):
        made.record("room", "timed out", at_ns=at_ns)
    first, second = made.since(0, 10)["events"]
    assert second["at_ns"] - first["at_ns"] == 2


@pytest.mark.parametrize(
    ("since", "limit", "expected", "follow", "dropped"),
    [
        (0, 100, list(range(15, 25)), 25, 15),
        (10, 100, list(range(15, 25)), 25, 5),
        (15, 100, list(range(15, 25)), 25, 0),
        (20, 100, list(range(20, 25)), 25, 0),
        (24, 100, [24], 25, 0),
        (25, 100, [], 25, 0),
        (99, 100, [], 25, 0),  # from another life of the agent
        (0, 3, [15, 16, 17], 18, 15),
        (20, 2, [20, 21], 22, 0),
        (20, 0, [], 20, 0),
        (None, 3, [22, 23, 24], 25, 0),
        (None, 0, [], 25, 0),
        (None, 100, list(range(15, 25)), 25, 0),
    ],
)
def test_25_entries_in_a_ring_of_10(
    since: int | None, limit: int, expected: list[int], follow: int, dropped: int
) -> None:
    events = recorder(25).since(since, limit)
    assert (numbers(events), events["next"], events["dropped"]) == (expected, follow, dropped)


def test_following_with_next_sees_every_entry_once() -> None:
    made, seen, since = recorder(0, capacity=100), list[int](), 0
    for round_ in range(20):
        for _ in range(round_):
            made.record("test", "x")
        while numbers(events := made.since(since, 4)):
            seen += numbers(events)
            since = events["next"]
    assert seen == list(range(sum(range(20))))


def entry(sequence: int) -> Entry:
    return Entry(sequence, 5, "test", "info", None, None, f"{sequence}")


def test_events_of_an_observer_take_numbers_between_those_of_the_agent() -> None:
    made = recorder(0)
    made.add(entry(7))
    made.record("admin", "own")
    made.add(entry(8))
    made.add(entry(9))
    assert [(each["sequence"], each["text"]) for each in made.since(0, 10)["events"]] == [
        (7, "7"),
        (8, "own"),
        (9, "8"),
        (10, "9"),
    ]


def test_events_that_were_lost_count_as_dropped() -> None:
    made = recorder(0)
    for number in (2, 3, 7, 8):
        made.add(entry(number))
    found = made.since(2, 10)
    assert (numbers(found), found["next"], found["dropped"]) == ([2, 3, 7, 8], 9, 3)
    assert made.since(4, 10)["dropped"] == 3
    assert made.since(7, 10)["dropped"] == 0


def test_a_recorder_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        RecordedEvents(Clock(), "a", 0)
