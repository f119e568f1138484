"""What the engine holds: calls that only enqueue, an order of calls that is checked, waits with a deadline."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.runtime.handles import HandleRegistry, PoolLimits, Receive, Send, page_array
from kvctl_agent.telemetry.engine_calls import CALLS
from kvctl_agent.telemetry.region import Cell
from tests.support.regions import REGION

CAUSE: Failure = {"rank": "decode-0", "code": "ABORTED", "at_ns": 1, "text": "enough"}


@pytest.fixture
def posted() -> list[ev.Event]:
    return []


@pytest.fixture
def send(posted: list[ev.Event]) -> Send:
    limits = PoolLimits(
        num_pages=100,
        aux_slots=4,
        layers=range(8, 16),
        state_slots=(3, 0),
        group_slots=(),
        group_tokens=(),
        page_tokens=16,
    )
    return Send(7, posted.append, REGION, limits)


def test_calls_are_noted_in_the_region(send: Send) -> None:
    receive, cells = Receive(8, lambda event: None, REGION), REGION.cells
    for made, name in (
        (lambda: send.prefetch(), "prefetch"),
        (lambda: send.pages([1]), "pages"),
        (lambda: send.layers(range(8, 16), [2], last=True), "layers"),
        (lambda: send.finish(), "finish"),
        (lambda: send.recall(), "recall"),
        (lambda: send.wait_recalled(0), "wait"),
        (lambda: send.abort("enough"), "abort"),
        (lambda: receive.recall(), "recall"),
        (lambda: receive.wait(0), "wait"),
    ):
        before_ns = time.monotonic_ns()
        made()
        assert CALLS[cells[Cell.CALL]] == name
        assert before_ns <= cells[Cell.CALL_NS] <= cells[Cell.CALL_ENDED_NS]
    thread = threading.Thread(target=receive.wait, args=(60,))
    thread.start()
    while cells[Cell.CALL_THREAD] != thread.ident or cells[Cell.CALL_ENDED_NS]:
        time.sleep(0.001)
    receive.release()
    receive.change_state(RoomState.SUCCESS, None)
    thread.join()
    assert cells[Cell.CALL_ENDED_NS] >= cells[Cell.CALL_NS]


class TestSend:
    def test_calls_become_events_in_order(self, send: Send, posted: list[Any]) -> None:
        before = time.monotonic_ns()
        send.prefetch()
        send.pages([3, 1])
        send.pages(np.array([2]), last=True)
        send.finish(aux_index=1)
        prefetch, first, second, finish = posted
        assert (prefetch.room, prefetch.groups) == (7, ())
        assert (first.pages.tolist(), first.last) == ([3, 1], False)
        assert (second.pages.tolist(), second.last) == ([2], True)
        assert (finish.room, finish.aux_index) == (7, 1)
        assert before <= first.at_ns <= second.at_ns <= finish.at_ns <= time.monotonic_ns()

    def test_layer_groups_and_state_become_events_too(self, send: Send, posted: list[Any]) -> None:
        send.prefetch([range(8, 12), range(12, 16)])
        send.layers(range(8, 12), [3, 1])
        send.layers(range(12, 16), [3, 1], last=True)
        send.finish(state_indices=[[2], [77]])
        prefetch, first, second, finish = posted
        assert prefetch.groups == ((8, 12), (12, 16))
        assert (first.layers, first.last) == ((8, 12), False)
        assert (second.layers, second.last) == ((12, 16), True)
        assert [items.tolist() for items in finish.states] == [[2], []]  # of the second component nothing is here

    @pytest.mark.parametrize("layers", [range(0, 4), range(12, 17), range(9, 9), range(8, 16, 2)])
    def test_layers_of_another_rank_are_an_error(self, send: Send, layers: range) -> None:
        with pytest.raises(LocalProtocolError, match=r"room 7: range.* is no group of this rank's layers 8-15"):
            send.layers(layers, [1])
        with pytest.raises(LocalProtocolError, match="no group of this rank's layers 8-15"):
            send.prefetch([layers])

    def test_state_outside_the_pool_is_an_error(self, send: Send) -> None:
        with pytest.raises(LocalProtocolError, match="room 7: state item 3 is outside the pool's 3"):
            send.finish(state_indices=[[3]])
        with pytest.raises(LocalProtocolError, match="room 7: 3 lists of state items, the model has 2 components"):
            send.finish(state_indices=[[], [], []])

    def test_a_page_outside_the_pool_of_its_group_is_an_error(self) -> None:
        limits = PoolLimits(
            num_pages=100, aux_slots=0, layers=range(8), state_slots=(), group_slots=(8, 0), group_tokens=(16, 16),
            page_tokens=16,
        )  # fmt: skip
        assert [pages.tolist() for pages in limits.groups(7, [[0, 7], [99]])] == [[0, 7], []]  # the second is not here
        with pytest.raises(LocalProtocolError, match="room 7: page 8 is outside the group's pool of 8"):
            limits.groups(7, [[0, 8]])

    def test_pages_after_the_last_ones_are_an_error(self, send: Send, posted: list[Any]) -> None:
        send.pages([1], last=True)
        with pytest.raises(LocalProtocolError, match="room 7: pages after the last ones"):
            send.pages([2])
        send.finish()
        with pytest.raises(LocalProtocolError, match="room 7 was finished already"):
            send.finish()
        for late in (lambda: send.pages([]), lambda: send.layers(range(8, 16), [1])):
            with pytest.raises(LocalProtocolError, match="after the last ones"):
                late()
        assert len(posted) == 2

    @pytest.mark.parametrize("pages", [[100], [0, 5, 2**31 - 1]])
    def test_a_page_outside_the_pool_is_refused_and_the_room_can_go_on(
        self, send: Send, posted: list[Any], pages: list[int]
    ) -> None:
        with pytest.raises(LocalProtocolError, match=f"room 7: page {max(pages)} is outside the pool of 100"):
            send.pages(pages, last=True)
        assert posted == []
        send.pages([99], last=True)

    @pytest.mark.parametrize("row", [-1, 4])
    def test_an_aux_row_outside_the_pool_is_refused(self, send: Send, posted: list[Any], row: int) -> None:
        with pytest.raises(
            LocalProtocolError, match=f"room 7: aux_index is {row}: it must be None or a row of the pool's 4"
        ):
            send.finish(aux_index=row)
        assert posted == []
        send.finish(aux_index=3)


def test_a_number_serves_the_next_room_as_soon_as_its_handle_is_released() -> None:
    """An engine that has seen that may begin the next room before the control loop has removed the handle."""
    registry = HandleRegistry("decode-0", None)
    first, second = Receive(7, lambda event: None, REGION), Receive(7, lambda event: None, REGION)
    registry.add(first)
    first.change_state(RoomState.FAILED, CAUSE)
    with pytest.raises(LocalProtocolError, match="room 7 is in use on decode-0"):
        registry.add(second)
    first.release()
    registry.add(second)
    registry._forget(first)
    assert registry.rooms == [7]
    assert registry.is_open(7)


class TestWait:
    def test_the_deadline_returns_the_state_of_that_moment(self, send: Send) -> None:
        send.change_state(RoomState.TRANSFERRING, None)
        started = time.monotonic()
        assert send.wait(0.05) is RoomState.TRANSFERRING
        assert time.monotonic() - started > 0.04

    def test_an_ended_room_is_waited_for_until_its_pages_are_free(self, send: Send) -> None:
        send.change_state(RoomState.FAILED, CAUSE)
        assert send.wait(0.02) is RoomState.FAILED
        assert not send.released
        threading.Timer(0.05, send.release).start()
        started = time.monotonic()
        assert send.wait(60) is RoomState.FAILED
        assert send.released
        assert time.monotonic() - started < 30
        assert send.error == CAUSE

    def test_several_waiters_all_wake(self) -> None:
        receive = Receive(1, lambda event: None, REGION)
        states: list[RoomState] = []
        threads = [threading.Thread(target=lambda: states.append(receive.wait(60))) for _ in range(4)]
        for thread in threads:
            thread.start()
        receive.change_state(RoomState.SUCCESS, None)
        receive.release()
        for thread in threads:
            thread.join()
        assert states == [RoomState.SUCCESS] * 4


class TestPageArray:
    @pytest.mark.parametrize(
        "pages", [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1], np.int64), np.array([2, 0, 1], np.uint16)]
    )
    def test_any_flat_list_of_integers(self, pages: Any) -> None:
        numbers = page_array(pages)
        assert numbers.dtype == np.int32
        assert numbers.tolist() == [2, 0, 1]

    def test_a_torch_tensor(self) -> None:
        torch = pytest.importorskip("torch")
        assert page_array(torch.tensor([2, 0, 1])).tolist() == [2, 0, 1]

    @pytest.mark.parametrize("nothing", [[], (), np.empty(0), np.empty((0, 3))])
    def test_no_pages(self, nothing: Any) -> None:
        assert page_array(nothing).tolist() == []

    @pytest.mark.parametrize(
        "wrong",
        [5, [[1, 2]], [1.5], ["a"], "12", [True], [-1], [2**31], [2**70], [[1], [2, 3]], [None], {"a": 1}, object()],
    )
    def test_anything_else_is_named(self, wrong: Any) -> None:
        with pytest.raises(LocalProtocolError, match="pages: "):
            page_array(wrong)
