"""Calls of an agent that are noted in its region, also those that fail, and that a closed agent still gets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import KvctlError
from kvctl_agent.telemetry.engine_calls import CALLS
from kvctl_agent.telemetry.region import Cell


def test_each_call_is_noted(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1), decode=(1, 1)).start()
    (prefill,), (decode,) = fleet.prefill, fleet.decode
    fleet.run(1, 4)

    def noted(agent: Any, call: Callable[[], Any]) -> str:
        cells = agent.telemetry.region.cells
        before_ns = cells[Cell.CALL_NS]
        with contextlib.suppress(KvctlError):
            call()
        cells = agent.telemetry.region.cells
        assert before_ns < cells[Cell.CALL_NS] <= cells[Cell.CALL_ENDED_NS]
        return CALLS[cells[Cell.CALL]]

    assert noted(prefill, lambda: prefill.send(2, fake=True)) == "send"
    assert noted(prefill, lambda: prefill.layer_groups(None)) == "layer_groups"
    assert noted(prefill, lambda: prefill.decline(3, "full", prefill="ipc:///nowhere", timeout_s=0.0)) == "decline"
    assert noted(decode, lambda: decode.receive(2, [], fake=True)) == "receive"
    assert noted(decode, lambda: decode.refuse(3, "full")) == "refuse"
    assert noted(decode, lambda: decode.renew([4])) == "renew"
    assert noted(decode, lambda: decode.drain(10.0)) == "drain"
    assert noted(prefill, lambda: prefill.unregister(10.0)) == "unregister"
    assert noted(prefill, prefill.register) == "register"
    for agent in (decode, prefill):
        assert noted(agent, agent.close) == "close"
        assert agent.telemetry.region.cells[Cell.LOOP_ENDED_NS] > 0
    assert noted(prefill, lambda: prefill.send(5)) == "send"


@pytest.mark.parametrize("call", ["waiting_for", "serving"])
def test_calls_of_any_thread_are_not(make_fleet: Any, call: str) -> None:
    fleet = make_fleet(prefill=(1, 1), decode=(1, 1)).start()
    cells = fleet.decode[0].telemetry.region.cells
    before = cells[Cell.CALL], cells[Cell.CALL_NS]
    getattr(fleet.decode[0], call)()
    assert before == (cells[Cell.CALL], cells[Cell.CALL_NS])


def test_status_tells_where_an_engine_with_rooms_is(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1), decode=(1, 1)).start()
    (prefill,), (decode,) = fleet.prefill, fleet.decode
    room = fleet.receive(fleet.room(1, 4))

    def until(agent: Any, condition: Callable[[Any], Any]) -> Any:
        deadline = time.monotonic() + 60
        while not condition(status := agent.observe.status()):
            assert time.monotonic() < deadline, status
            time.sleep(0.02)
        return status

    here = "test_status_tells_where_an_engine_with_rooms_is"  # unless the sample finds it deep in `status`
    status = until(decode, lambda status: any(frame.endswith(here) for frame in status["engine_stack"] or ()))
    assert (status["engine_call"], status["engine_in_call"]) == ("receive", False)
    assert status["engine_call_age_ns"] > 1_000_000_000
    # An engine that has not begun the room has nothing to call.
    until(prefill, lambda status: status["rooms"])
    assert until(prefill, lambda status: True)["engine_call"] is None
    fleet.feed(fleet.claim(room))
    status = until(prefill, lambda status: status["engine_call"] == "finish" or not prefill.parts.handles.count)
    assert room.wait() == {RoomState.SUCCESS}
    assert until(decode, lambda status: status["engine_call"] is None)["engine_stack"] is None
