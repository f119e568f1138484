"""The input log: retention, rotation, and its cost on the machine's thread."""

from __future__ import annotations

import base64
import threading
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import recording
from kvctl_agent.protocol.recording import InputLog, Pieces, outcome
from tests.support.protocol.simulation import SECOND, World


class Idle:
    """A machine of which only the log's questions matter."""

    def __init__(self, rooms: int = 0, handle: Callable[[], object] = lambda: None) -> None:
        self.local, self.timing = "local", "timing"
        self.open_rooms = rooms
        self._handle = handle

    def handle(self, event: ev.Event, now_ns: int) -> list[ev.Action]:
        self._handle()
        return []


def tick_all(log: InputLog, count: int, first: int = 0) -> None:
    for now_ns in range(first, first + count):
        log.handle(Idle(), ev.Tick(), now_ns)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Checkpoints are numbers here; with a crowd of more than 10 rooms there is none."""
    made: list[Any] = []

    class Copy:
        def __init__(self, machine: Any, budget_ns: int) -> None:
            if machine.open_rooms > 10:
                raise recording.TooSlow
            made.append(machine.open_rooms)

        def pack(self) -> bytes:
            return b"checkpoint"

    monkeypatch.setattr(recording, "Copy", Copy)
    return made


def numbers(pieces: Pieces) -> list[tuple[int, int]]:
    return [(blob["first"], blob["count"]) for blob in pieces.blobs]


def test_inputs_come_back_with_what_they_led_to() -> None:
    log = InputLog(1000)
    machine = log.begin(World().d())
    opened = ev.OpenRoom(7, 8, np.arange(3, dtype=np.int32), 0, 3, -1, "registry-9")
    actions = log.handle(machine, opened, 5)
    handled: list[Any] = []
    log.handle(Idle(handle=lambda: handled.extend(log.pieces(None, None).blobs)), ev.Tick(), 6)
    checkpoint, inputs = handled
    assert (checkpoint["kind"], inputs["kind"]) == ("checkpoint", "inputs")
    _, rows = msgspec.msgpack.decode(zlib.decompress(base64.b64decode(inputs["data"])))
    assert [(row[0], row[1], row[3]) for row in rows] == [(5, "OpenRoom", outcome(actions)), (6, "Tick", "")]


def test_the_oldest_generation_goes_when_two_are_full(copies: list[Any]) -> None:
    log = InputLog(100)
    log.begin(Idle())  # type: ignore[type-var]
    tick_all(log, 1000)
    kept = numbers(log.pieces(None, None))
    assert len(copies) > 5
    assert sum(count for _, count in kept) <= 100
    assert kept[0][1] == 0
    assert kept[-1][0] + kept[-1][1] == 1000
    assert log.missed == 0


def test_a_checkpoint_waits_for_a_moment_without_rooms(copies: list[Any]) -> None:
    log = InputLog(4096)
    machine = Idle()
    log.begin(machine)  # type: ignore[type-var]
    machine.open_rooms = 3
    tick_all(log, 1500)
    assert copies == [0]
    machine.open_rooms = 0
    tick_all(log, 1)
    assert copies == [0, 0]
    machine.open_rooms = 3
    tick_all(log, 2500)  # full: then also with rooms
    assert copies == [0, 0, 3]


def test_where_none_can_be_had_the_recording_has_a_gap_and_says_so(copies: list[Any]) -> None:
    log = InputLog(100)
    machine = Idle()
    log.begin(machine)  # type: ignore[type-var]
    machine.open_rooms = 11
    tick_all(log, 500)
    assert sum(count for _, count in numbers(log.pieces(None, None))) == 100
    assert log.missed == 400
    machine.open_rooms = 0
    tick_all(log, 10)
    kept = numbers(log.pieces(None, None))
    assert kept[-2:] == [(500, 0), (500, 10)]
    assert log.missed == 400


def test_a_checkpoint_that_took_too_long_is_not_tried_at_every_input(
    copies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rooms that our engine has announced and nobody has opened are not open, and yet are in it, by the thousand."""
    tries: list[int] = []

    copy, in_time = recording.Copy, False  # type: ignore[attr-defined]

    def late(machine: Any, budget_ns: int) -> Any:
        tries.append(log.taken)
        if len(tries) > 1 and not in_time:
            raise recording.TooSlow  # type: ignore[attr-defined]
        return copy(machine, budget_ns)

    monkeypatch.setattr(recording, "Copy", late)
    log = InputLog(100)
    log.begin(Idle())  # type: ignore[type-var]
    tick_all(log, 3 * recording.AGAIN_AFTER)
    assert len(tries) <= 4
    given_up, in_time = tries[-1], True
    tick_all(log, recording.AGAIN_AFTER)
    assert numbers(log.pieces(None, None))[-1][0] > given_up, "it goes on once a checkpoint can be had"


@pytest.mark.parametrize("capacity", [0, 100])
def test_paths_are_kept_of_recorded_inputs_only(capacity: int, copies: list[Any]) -> None:
    log = InputLog(capacity)
    machine = Idle()
    log.begin(machine)  # type: ignore[type-var]
    machine.open_rooms = 11
    choose = log.recording_paths(lambda: "staged")
    chosen: list[str] = []
    for now_ns in range(500):
        log.handle(Idle(handle=lambda: chosen.append(choose())), ev.Tick(), now_ns)
    assert chosen == ["staged"] * 500
    assert log.missed == 500 - capacity
    assert len(log._batch.paths) <= len(log._batch.inputs)


def test_bytes_bound_it_too(copies: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_BYTES", 1 << 20)
    log = InputLog(1 << 16)
    log.begin(Idle())  # type: ignore[type-var]
    for number in range(4096):
        log.handle(Idle(), ev.SendPages(1, np.arange(number, number + 1000, dtype=np.int32), False, 0), number)
    kept = sum(len(blob.data) for blob in log._blobs if isinstance(blob.data, bytes))
    assert kept < (1 << 20) + recording.BATCH * 4100
    assert log.missed == 0


@pytest.mark.parametrize("rooms", [0, 10])
def test_large_inputs_cause_no_more_checkpoints_than_small_ones(rooms: int, copies: list[Any]) -> None:
    log = InputLog(1 << 16)
    machine = Idle(rooms)
    log.begin(machine)  # type: ignore[type-var]
    event = ev.SendPages(1, np.arange(1000, dtype=np.int32), False, 0)
    for now_ns in range(20_000):  # 80 MB
        log.handle(machine, event, now_ns)
    assert 2 < len(copies) <= 14
    assert sum(count == 0 for _, count in numbers(log.pieces(None, None, 1 << 30))) <= 5


@pytest.mark.parametrize("max_bytes", range(660_000, 740_000, 8_000))
def test_after_a_miss_it_goes_on_with_a_checkpoint_only(
    max_bytes: int, copies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one small old segment after the other is dropped until there is space again."""
    monkeypatch.setattr(recording, "MAX_BYTES", max_bytes)
    log = InputLog(4096)
    machine = Idle()
    log.begin(machine)  # type: ignore[type-var]
    tick_all(log, 2200)
    machine.open_rooms = 11
    event = ev.SendPages(1, np.arange(1000, dtype=np.int32), False, 0)
    missed = []
    for now_ns in range(2200, 2600):
        log.handle(machine, event, now_ns)
        missed.append(log.missed)
    first = missed.index(1)
    assert missed[first:] == list(range(1, 401 - first))
    machine.open_rooms = 0
    tick_all(log, 10, 2600)
    assert numbers(log.pieces(None, None))[-2:] == [(2600, 0), (2600, 10)]


def test_pages_go_from_one_to_the_next_and_tell_what_has_gone(copies: list[Any]) -> None:
    log = InputLog(100)
    log.begin(Idle())  # type: ignore[type-var]
    tick_all(log, 60)
    first = log.pieces(None, None, page_bytes=1)
    assert len(first.blobs) == 1
    assert first.next < first.end
    tick_all(log, 500)
    second = log.pieces(first.next, first.end, page_bytes=1)
    assert (second.blobs, second.next, second.end) == ([], first.end, first.end)
    assert second.dropped == first.end - first.next


def test_none_are_kept_where_none_are_wanted() -> None:
    log = InputLog(0)
    log.begin(World().d())
    tick_all(log, 10)
    assert log.pieces(None, None) == Pieces([], 0, 0, 0)
    assert log.missed == 10


def test_what_cannot_be_written_leaves_a_gap_and_harms_nobody() -> None:
    log = InputLog(1000)
    log.begin(World().d())
    log.handle(Idle(), ev.AbortRoom(1 << 70, "no such number"), 1)
    tick_all(log, 1)
    _, inputs = log.pieces(None, None).blobs
    _, rows = msgspec.msgpack.decode(zlib.decompress(base64.b64decode(inputs["data"])))
    assert [row[1] for row in rows] == ["", "Tick"]


def test_a_fault_in_a_checkpoint_ends_the_recording_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(machine: Any, budget_ns: int) -> Any:
        raise TypeError("a checkpoint cannot hold a Surprise")

    monkeypatch.setattr(recording, "Copy", copy)
    log = InputLog(100)
    log.begin(World().d())
    tick_all(log, 5)
    assert log.fault == "TypeError: a checkpoint cannot hold a Surprise"
    assert log.missed == 5


def test_a_reader_on_another_thread_sees_whole_pieces_in_order() -> None:
    log = InputLog(4096)
    machine = log.begin(World().d())
    done = threading.Event()
    seen: list[str] = []

    def read() -> None:
        while not done.is_set():
            following = -1
            for blob in log.pieces(None, None).blobs:
                if blob["kind"] == "inputs":
                    _, rows = msgspec.msgpack.decode(zlib.decompress(base64.b64decode(blob["data"])))
                    if len(rows) != blob["count"] or (following not in (-1, blob["first"])):
                        seen.append(f"{blob['first']} after {following}: {len(rows)} rows")
                following = blob["first"] + blob["count"]

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(20_000):
            event = ev.Tick()
            log.handle(machine, event, SECOND + number)
    finally:
        done.set()
        reader.join(60)
    assert not seen
