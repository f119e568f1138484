"""Request ids and trace contexts beside rooms: each rank shows the ones that its own engine passed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from tests.support.folded import folded

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def row(agent: Any, room: int) -> Any:
    """The row of an active room, as soon as the control thread has opened it."""
    deadline = time.monotonic() + 60
    while not (found := [row for row in agent.observe.rooms() if row["room"] == str(room)]):
        assert time.monotonic() < deadline, f"{agent.name} never opened room {room}"
        time.sleep(0.002)
    return found[0]


@pytest.fixture
def fleet(make_fleet: Any) -> Any:
    return make_fleet("loopback", prefill=(1, 1), decode=(1, 1)).start()


def test_each_rank_shows_the_id_of_its_own_engine(fleet: Any) -> None:
    (prefill,), (decode,) = fleet.prefill, fleet.decode
    handles = [prefill.send(7, request_id="cmpl-1", traceparent=PARENT)]
    handles.append(decode.receive(7, [0], request_id="cmpl-1-0"))
    assert (row(prefill, 7)["request_id"], row(decode, 7)["request_id"]) == ("cmpl-1", "cmpl-1-0")
    assert [folded(agent.telemetry).rooms.find(7)[0].traceparent for agent in (prefill, decode)] == [PARENT, ""]
    handles[0].abort("enough")
    assert [handle.wait(60) for handle in handles] == [RoomState.FAILED] * 2
    assert prefill.observe.failed()["rooms"][0]["request_id"] == "cmpl-1"
    fleet.settle()


def test_a_room_that_decode_opens_first_gets_the_id_with_send(fleet: Any) -> None:
    (prefill,), (decode,) = fleet.prefill, fleet.decode
    receive = decode.receive(7, [0], traceparent="of no client")
    assert row(prefill, 7)["request_id"] is None
    send = prefill.send(7, request_id="cmpl-1")
    send.abort("enough")  # after the event of send
    assert {handle.wait(60) for handle in (send, receive)} == {RoomState.FAILED}
    assert prefill.observe.failed()["rooms"][0]["request_id"] == "cmpl-1"
    assert decode.observe.failed()["rooms"][0]["request_id"] is None
    assert folded(decode.telemetry).rooms.find(7)[0].traceparent == ""
    fleet.settle()


def test_an_id_that_is_no_text_opens_no_room(fleet: Any) -> None:
    with pytest.raises(LocalProtocolError, match="room 7: request_id is 5: it must be text"):
        fleet.prefill[0].send(7, request_id=5)
    with pytest.raises(LocalProtocolError, match="room 7: request_id is None: it must be text"):
        fleet.decode[0].receive(7, [0], request_id=None)
    fleet.run(7, 8)
    fleet.check()
