"""Where rooms meet the engine: a number is in use until its room has ended and its pages are free."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.runtime.desk import Desk
from kvctl_agent.runtime.handles import Receive

CAUSE: Failure = {"rank": "prefill-0", "code": "ABORTED", "at_ns": 1, "text": "enough"}


@pytest.fixture
def told() -> list[tuple[int, RoomState]]:
    return []


@pytest.fixture
def desk(told: list[Any]) -> Desk:
    return Desk("decode-0", lambda handle, state: told.append((handle.room, state)))


def taken(desk: Desk, room: int = 7) -> Receive:
    handle = Receive(room, lambda event: None)
    desk.add(handle)
    return handle


def test_states_reach_the_handle_and_then_the_engine(desk: Desk, told: list[Any]) -> None:
    handle = taken(desk)
    desk.tell(7, RoomState.TRANSFERRING, None)
    assert handle.state is RoomState.TRANSFERRING
    assert told == [(7, RoomState.TRANSFERRING)]


@pytest.mark.parametrize("released_first", [True, False])
def test_a_number_is_free_when_its_room_has_ended_and_released_its_pages(desk: Desk, released_first: bool) -> None:
    taken(desk)
    steps = [lambda: desk.release(7), lambda: desk.tell(7, RoomState.FAILED, CAUSE)]
    for step in steps if released_first else reversed(steps):
        with pytest.raises(LocalProtocolError, match="room 7 is in use on decode-0"):
            taken(desk)
        step()
    taken(desk)


@pytest.mark.parametrize("room", [-1, 1 << 64])
def test_what_is_no_room_number_is_refused(desk: Desk, room: int) -> None:
    with pytest.raises(LocalProtocolError, match="is no unsigned 64-bit number"):
        taken(desk, room)


def test_a_room_that_the_machine_does_not_take_has_failed_and_holds_nothing(desk: Desk, told: list[Any]) -> None:
    handle = taken(desk)
    desk.refuse(7, "room 7 is open already")
    assert (handle.state, handle.released) == (RoomState.FAILED, True)
    assert handle.error is not None
    assert (handle.error["code"], handle.error["text"]) == ("KV_ROOM_DUPLICATE", "room 7 is open already")
    assert told == [(7, RoomState.FAILED)]
    assert desk.rooms == []


def test_a_fake_room_has_succeeded_and_uses_no_number(desk: Desk, told: list[Any]) -> None:
    handle = Receive(7, lambda event: None)
    desk.finish(handle)
    assert (handle.state, handle.released) == (RoomState.SUCCESS, True)
    assert told == [(7, RoomState.SUCCESS)]
    assert desk.rooms == []


def test_what_is_left_at_the_end_has_failed_and_its_pages_are_not_released(desk: Desk) -> None:
    handle = taken(desk)
    desk.close()
    assert (handle.state, handle.released) == (RoomState.FAILED, False)
    assert handle.error is not None
    assert handle.error["text"] == "agent decode-0 was closed with the room in flight"


def test_news_of_unknown_rooms_change_nothing(desk: Desk, told: list[Any]) -> None:
    desk.tell(8, RoomState.SUCCESS, None)
    desk.release(8)
    desk.refuse(8, "")
    assert told == []
