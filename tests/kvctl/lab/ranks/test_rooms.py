"""Rooms of a prefill rank whose agent refuses a call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvctl.lab.ranks.messages import Open, Room
from kvctl.lab.ranks.rooms import PrefillRooms
from kvctl.lab.ranks.worker import StateChange, Worker
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.runtime.handles import Send

REFUSAL = "page 3 is outside the pool"


class RefusingSend(Send):
    """Handle of a room whose pages the agent refuses."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.state = RoomState.BOOTSTRAPPING
        self.error = None

    def prefetch(self, *_: Any) -> None: ...

    def pages(self, *_: Any, **__: Any) -> None:
        raise LocalProtocolError(REFUSAL)

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)


def test_a_refused_call_of_a_live_rank_ends_the_rank() -> None:
    sent: list[Any] = []
    start = SimpleNamespace(verify=False, name="prefill-0", role="prefill")
    rooms_of_content: dict[int, Room] = {}
    content = SimpleNamespace(
        start=start,
        rooms=rooms_of_content,
        add=lambda room: rooms_of_content.update({room.number: room}),
        pages=lambda number: [3],
    )
    worker = SimpleNamespace(
        content=content,
        start=start,
        agent=SimpleNamespace(send=RefusingSend, layers=range(2)),
        faults=SimpleNamespace(should_fire=lambda kind: None),
        send=lambda *message: sent.append(message),
    )
    rooms = PrefillRooms(cast(Worker, worker))
    rooms.open(Open(Room(index=0, number=7, tokens=16, prefix_tokens=0)))
    (handle,) = rooms.handles.values()
    rooms.changed(StateChange(handle, RoomState.WAITING_FOR_INPUT, 0))
    with pytest.raises(LocalProtocolError, match=REFUSAL):
        rooms.poll()
    assert not sent


def test_a_refused_call_fails_its_room_of_a_batch_alone(
    fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = fleet()
    accept, refused = Send.pages, []

    def refuse(send: Send, *pages: Any, **more: Any) -> None:
        if not refused or send.room in refused:
            refused.append(send.room)
            raise LocalProtocolError(REFUSAL)
        accept(send, *pages, **more)

    monkeypatch.setattr(Send, "pages", refuse)
    reports = bench.run("slice")
    assert [len(report["failures"]) for report in reports.values()] == [1, 1]
    assert all(REFUSAL in text for report in reports.values() for _, text in report["failures"])
    assert {len(report["rooms"]) for report in reports.values()} == {5}
    assert {len(report["held"]) for report in reports.values()} == {0}
