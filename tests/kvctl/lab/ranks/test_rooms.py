"""Rooms of a prefill rank beside a scripted agent: calls that the agent refuses, and the end of a batch."""

from __future__ import annotations

import time
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvctl.lab.ranks.batch import Batch
from kvctl.lab.ranks.messages import Open, Room
from kvctl.lab.ranks.rooms import PrefillRooms
from kvctl.lab.ranks.worker import StateChange, Worker
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.runtime.handles import Send

ROOM = Room(index=0, number=7, tokens=16, prefix_tokens=0)


class RefusingSend(Send):
    """Handle of a room whose pages the agent refuses."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.state = RoomState.BOOTSTRAPPING
        self.error = None
        self.released = False
        self.reasons: list[str] = []
        self.waits: list[float] = []

    def prefetch(self, *_: Any) -> None: ...

    def pages(self, *_: Any, **__: Any) -> None:
        raise LocalProtocolError("page 3 is outside the pool")

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)

    def wait(self, timeout: float) -> RoomState:
        self.waits.append(timeout)
        self.released = True
        return self.state


class Content:
    """Content of a pool in which every room has one page."""

    start = SimpleNamespace(verify=False)

    def __init__(self) -> None:
        self.rooms: dict[int, Room] = {}

    def add(self, room: Room) -> None:
        self.rooms[room.number] = room

    def pages(self, number: int) -> list[int]:
        return [3]


def rank() -> tuple[PrefillRooms, list[tuple[str, Any]]]:
    """Returns the rooms of a prefill rank, and the list to which its messages are added."""
    sent: list[tuple[str, Any]] = []
    worker = SimpleNamespace(
        content=Content(),
        start=SimpleNamespace(verify=False, name="prefill-0", role="prefill"),
        agent=SimpleNamespace(send=RefusingSend, layers=range(2)),
        faults=SimpleNamespace(should_fire=lambda kind: None),
        inbox=SimpleQueue(),
        send=lambda *message: sent.append(message),
    )
    return PrefillRooms(cast(Worker, worker)), sent


def batch(rooms: PrefillRooms) -> Batch:
    """Begins a batch in which the agent has opened a room, and refuses its pages."""

    def refuse(room: Room, send: Send, *_: Any) -> Any:
        send.pages([3])
        yield 0

    aborts = SimpleNamespace(abort_due=lambda now_ns: None, began=lambda *_: None, next_ns=None)
    report = SimpleNamespace(
        command=SimpleNamespace(layer_ms=0), busy=None, aborts=aborts, failures={}, release_ns=None
    )
    report.deadline_ns = time.monotonic_ns() + 60 * 10**9
    report.report = lambda held: {"held": held}
    rooms.content.add(ROOM)
    rooms.handles[ROOM.number] = RefusingSend(ROOM.number)
    rooms._forward = cast(Any, SimpleNamespace(ready=True, run=refuse))
    rooms._to_compute.add(ROOM.number)
    rooms.batch = cast(Batch, report)
    return rooms.batch


def test_a_refused_call_of_a_live_rank_ends_the_rank() -> None:
    rooms, sent = rank()
    rooms.open(Open(ROOM))
    (handle,) = rooms.handles.values()
    rooms.changed(StateChange(handle, RoomState.WAITING_FOR_INPUT, time.monotonic_ns()))
    with pytest.raises(LocalProtocolError, match="page 3 is outside the pool"):
        rooms.poll()
    assert not cast(RefusingSend, handle).reasons
    assert not sent


def test_a_refused_call_fails_its_room_of_a_batch() -> None:
    rooms, _ = rank()
    batch(rooms)
    (handle,) = rooms.handles.values()
    rooms.changed(StateChange(handle, RoomState.WAITING_FOR_INPUT, time.monotonic_ns()))
    rooms.poll()
    assert cast(RefusingSend, handle).reasons == ["page 3 is outside the pool"]


def test_a_batch_ends_at_the_release_of_its_pages() -> None:
    rooms, sent = rank()
    run = batch(rooms)
    handle = cast(RefusingSend, rooms.handles[ROOM.number])
    rooms._ended.add(ROOM.number)
    assert rooms.poll() is not None
    assert handle.waits == [pytest.approx(0.01)], "the release ends the wait"
    assert rooms.poll() is None
    assert sent == [("answer", {"held": []})]
    assert run.release_ns is not None
    assert rooms.batch is None
