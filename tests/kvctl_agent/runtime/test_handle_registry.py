"""The registry of open handles: a number is in use until its room has ended and its pages are free."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol.events import Finish, Recall, Recalled, Released, SendPages, StateChanged
from kvctl_agent.runtime.handles import HandleRegistry, PoolLimits, Receive, Send
from kvctl_agent.runtime.page_owners import PageOwners
from tests.support.regions import REGION

CAUSE: Failure = {"rank": "prefill-0", "code": "ABORTED", "at_ns": 1, "text": "enough"}


@pytest.fixture
def told() -> list[tuple[int, RoomState]]:
    return []


@pytest.fixture
def registry(told: list[Any]) -> HandleRegistry:
    return HandleRegistry("decode-0", lambda handle, state: told.append((handle.room, state)))


def taken(registry: HandleRegistry, room: int = 7) -> Receive:
    handle = Receive(room, lambda event: None, REGION)
    registry.add(handle)
    return handle


def test_states_reach_the_handle_and_then_the_engine(registry: HandleRegistry, told: list[Any]) -> None:
    handle = taken(registry)
    registry.change_state(StateChanged(7, RoomState.TRANSFERRING))
    assert handle.state is RoomState.TRANSFERRING
    assert told == [(7, RoomState.TRANSFERRING)]


@pytest.mark.parametrize("released_first", [True, False])
def test_a_number_is_free_when_its_room_has_ended_and_released_its_pages(
    registry: HandleRegistry, released_first: bool
) -> None:
    taken(registry)
    steps = [
        lambda: registry.release(Released(7)),
        lambda: registry.change_state(StateChanged(7, RoomState.FAILED, CAUSE)),
    ]
    for step in steps if released_first else reversed(steps):
        with pytest.raises(LocalProtocolError, match="room 7 is in use on decode-0"):
            taken(registry)
        step()
    taken(registry)


def test_the_engine_learns_that_all_of_a_room_is_sent(registry: HandleRegistry, told: list[Any]) -> None:
    handle = Send(7, lambda event: None, REGION, PoolLimits(8, 0, range(2), (), (), (), 16))
    registry.add(handle)
    registry.change_state(StateChanged(7, RoomState.TRANSFERRING))
    registry.release(Released(7))
    assert handle.sent
    assert told == [(7, RoomState.TRANSFERRING)] * 2


def test_the_release_of_a_failed_room_is_no_news(registry: HandleRegistry, told: list[Any]) -> None:
    taken(registry)
    registry.change_state(StateChanged(7, RoomState.FAILED, CAUSE))
    registry.release(Released(7))
    assert told == [(7, RoomState.FAILED)]


class TestRecall:
    def test_the_pages_are_reusable_after_the_last_of_several_recalls(
        self, registry: HandleRegistry, told: list[Any]
    ) -> None:
        posted: list[Any] = []
        handle = Send(7, posted.append, REGION, PoolLimits(8, 0, range(2), (), (), (), 16))
        registry.add(handle)
        assert not handle.recalled
        handle.recall()
        handle.recall()
        assert posted == [Recall(7, 1), Recall(7, 2)]
        registry.end_recall(Recalled(7, 1))  # that of before, which arrives late
        assert not handle.recalled
        assert not handle.wait_recalled(0)
        registry.end_recall(Recalled(7, 2))
        assert handle.recalled
        assert handle.wait_recalled(0)
        assert told == [(7, RoomState.BOOTSTRAPPING)] * 2

    def test_the_prompt_may_be_passed_and_finished_again(self, registry: HandleRegistry) -> None:
        posted: list[Any] = []
        handle = Send(7, posted.append, REGION, PoolLimits(8, 0, range(2), (), (), (), 16))
        for _ in range(2):
            handle.pages([1], last=True)
            handle.finish()
            with pytest.raises(LocalProtocolError):
                handle.pages([2])
            handle.recall()
        assert [type(event) for event in posted] == [SendPages, Finish, Recall] * 2

    def test_a_room_that_is_released_needs_no_answer(self, registry: HandleRegistry) -> None:
        handle = Send(7, lambda event: None, REGION, PoolLimits(8, 0, range(2), (), (), (), 16))
        registry.add(handle)
        handle.recall()
        registry.release(Released(7))
        assert handle.recalled

    def test_on_the_decode_side_the_room_ends_with_a_code_of_its_own(self, registry: HandleRegistry) -> None:
        posted: list[Any] = []
        handle = Receive(7, posted.append, REGION)
        registry.add(handle)
        handle.recall()
        assert posted == [Recall(7)]
        registry.change_state(StateChanged(7, RoomState.FAILED, {**CAUSE, "code": "RECALLED"}))
        assert not handle.recalled
        registry.release(Released(7))
        assert handle.recalled
        handle.recall()
        assert len(posted) == 1
        other = taken(registry)
        registry.change_state(StateChanged(7, RoomState.FAILED, CAUSE))
        registry.release(Released(7))
        assert not other.recalled


class TestMemory:
    """Pages [4, 5] of room 7 belong to it until nothing writes to them any more."""

    @pytest.fixture
    def registry(self, told: list[Any]) -> HandleRegistry:
        # The pages are free before the engine can know that the room has succeeded.
        def on_state(handle: Any, state: RoomState) -> None:
            told.append((handle.room, state))
            if state is RoomState.SUCCESS:
                self.add(registry, 8, [5])

        registry = HandleRegistry("decode-0", on_state, PageOwners([("page", 10)]))
        return registry

    @staticmethod
    def add(registry: HandleRegistry, room: int, pages: list[int]) -> None:
        registry.add(Receive(room, lambda event: None, REGION), (np.array(pages, np.int32),))

    def test_they_cannot_be_given_to_another_room(self, registry: HandleRegistry) -> None:
        self.add(registry, 7, [4, 5])
        with pytest.raises(LocalProtocolError, match="room 8: page 5 belongs to room 7, which may still be written to"):
            self.add(registry, 8, [6, 5])
        assert registry.rooms == [7]
        self.add(registry, 8, [6])

    def test_a_failed_room_keeps_them_until_it_is_released(self, registry: HandleRegistry) -> None:
        self.add(registry, 7, [4, 5])
        registry.change_state(StateChanged(7, RoomState.FAILED, CAUSE))
        with pytest.raises(LocalProtocolError, match="page 5 belongs to room 7"):
            self.add(registry, 8, [5])
        registry.release(Released(7))
        self.add(registry, 8, [5])

    def test_a_room_that_succeeded_gives_them_up_before_its_state_is_seen(
        self, registry: HandleRegistry, told: list[Any]
    ) -> None:
        self.add(registry, 7, [4, 5])
        registry.change_state(StateChanged(7, RoomState.SUCCESS))
        assert told == [(7, RoomState.SUCCESS)]
        assert registry.rooms == [7, 8]

    def test_a_room_that_the_machine_refuses_gives_them_up(self, registry: HandleRegistry) -> None:
        self.add(registry, 7, [4, 5])
        registry.refuse(7, "room 7 is open already")
        self.add(registry, 8, [5])

    def test_a_number_in_use_takes_nothing(self, registry: HandleRegistry) -> None:
        self.add(registry, 7, [4])
        with pytest.raises(LocalProtocolError, match="room 7 is in use"):
            self.add(registry, 7, [5])
        self.add(registry, 8, [5])


def test_a_room_that_the_machine_does_not_take_has_failed_and_holds_nothing(
    registry: HandleRegistry, told: list[Any]
) -> None:
    handle = taken(registry)
    registry.refuse(7, "room 7 is open already")
    assert (handle.state, handle.released) == (RoomState.FAILED, True)
    assert handle.error is not None
    assert (handle.error["code"], handle.error["text"]) == ("KV_ROOM_DUPLICATE", "room 7 is open already")
    assert told == [(7, RoomState.FAILED)]
    assert registry.rooms == []


def test_a_fake_room_has_succeeded_and_uses_no_number(registry: HandleRegistry, told: list[Any]) -> None:
    handle = Receive(7, lambda event: None, REGION)
    registry.finish(handle)
    assert (handle.state, handle.released) == (RoomState.SUCCESS, True)
    assert told == [(7, RoomState.SUCCESS)]
    assert registry.rooms == []


def test_what_is_left_at_the_end_has_failed_and_its_pages_are_not_released(registry: HandleRegistry) -> None:
    handle = taken(registry)
    registry.close()
    assert (handle.state, handle.released) == (RoomState.FAILED, False)
    assert handle.error is not None
    assert handle.error["text"] == "agent decode-0 was closed with the room in flight"


def test_news_of_unknown_rooms_change_nothing(registry: HandleRegistry, told: list[Any]) -> None:
    registry.change_state(StateChanged(8, RoomState.SUCCESS))
    registry.release(Released(8))
    registry.refuse(8, "")
    assert told == []
