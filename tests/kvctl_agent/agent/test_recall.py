"""Engines that take the pages of a room back, and deadlines of rooms that one side never begins; real transports."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from tests.support.agents import POISON
from tests.support.host_device import JUNK
from tests.support.polling import until

SUCCESS, FAILED = {RoomState.SUCCESS}, {RoomState.FAILED}


def blocks(agent: Any) -> list[np.ndarray]:
    """The planes of an agent's pool with one row for each page."""
    segment = agent.pool.segments[0]
    layers = range(segment.shard.layer_lo, segment.shard.layer_hi)
    return [segment.block(layer, kv).reshape(segment.num_slots, -1) for layer in layers for kv in (0, 1)]


def move(fleet: Any, room: Any) -> np.ndarray:
    """Moves a room's prompt to other pages of the prefill pools, and gives the old pages to somebody else."""
    used = set(room.src.tolist())
    other = np.array([page for page in range(fleet.model.pages) if page not in used][: len(room.src)])
    for agent in fleet.prefill:
        for block in blocks(agent):
            block[other] = block[room.src]
            block[room.src] = JUNK
    return other


def finish(fleet: Any, room: Any, pages: np.ndarray) -> None:
    for send in room.sends:
        send.pages(pages, last=True)
        send.finish(aux_index=room.aux)


class TestPrefill:
    def test_at_any_time_under_load_and_every_byte_is_right(self, make_fleet: Any) -> None:
        fleet = make_fleet("nixl", prefill=(1, 1), path="staged", chunk_tokens=16).start()
        for number in range(1, 25):
            room = fleet.claim(fleet.receive(fleet.room(number, 12)))
            fleet.feed(room, (3, 7))
            time.sleep(0.0003 * number)
            for send in room.sends:
                send.recall()
            assert all(send.wait_recalled(60) for send in room.sends)
            other = move(fleet, room)
            if not all(send.sent for send in room.sends):
                finish(fleet, room, other)
            assert room.wait() == SUCCESS, room.errors()
            for agent in fleet.prefill:  # all pages hold their own truth again
                for layer in range(fleet.model.layers):
                    for kv in (0, 1):
                        agent.pool.segments[0].block(layer, kv)[:] = fleet.model.truth(layer, kv).reshape(-1)
            fleet.expect(room)
            fleet.check()
            fleet.recycle(room)
        fleet.settle()
        assert fleet.errors() == []

    def test_an_operator_sees_what_the_room_waits_for(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1), decode=(1, 1), path="slice").start()
        room = fleet.claim(fleet.receive(fleet.room(1, 4)))
        (send,) = room.sends
        until(lambda: send.state is RoomState.WAITING_FOR_INPUT)
        send.recall()
        assert send.wait_recalled(60)

        def show() -> Any:
            (row,) = fleet.prefill[0].observe.room(1)
            return row

        (owed,) = show()["owed_parts"]
        assert owed["waits_for"] == "its engine to pass the recalled pages again"
        receive = room.receives["decode-0"]
        receive.recall()
        assert receive.wait(60) is RoomState.FAILED
        assert show()["peers"] == []
        fleet.receive(room)
        until(lambda: show()["peers"] == ["decode-0"])
        assert show()["nonce"] != "0"
        finish(fleet, room, room.src)
        assert room.wait() == SUCCESS, room.errors()

    def test_rooms_that_have_ended_or_move_nothing(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1)).start()
        room = fleet.run(1, 4)
        room.sends[0].recall()
        assert room.sends[0].recalled
        fake = fleet.prefill[0].send(2, fake=True)
        fake.recall()
        fake.pages([1, 2], last=True)
        fake.finish()
        assert fake.recalled
        lost = fleet.claim(fleet.receive(fleet.room(3, 4)))
        lost.sends[0].abort("enough")
        assert lost.wait() == FAILED
        lost.sends[0].recall()
        assert lost.sends[0].wait_recalled(60)
        with pytest.raises(LocalProtocolError):
            lost.sends[0].wait_recalled("soon")

    def test_on_state_is_called_when_the_pages_may_be_reused(self, make_fleet: Any) -> None:
        seen: list[bool] = []
        back = threading.Event()

        def on_state(handle: Any, state: RoomState) -> None:
            seen.append(handle.recalled)
            if handle.recalled and not state.finished:
                back.set()

        fleet = make_fleet(prefill=(1, 1), on_state=on_state).start()
        (send,) = fleet.claim(fleet.room(1, 4)).sends
        send.recall()
        assert back.wait(60)


class TestDecode:
    def test_the_room_is_opened_again_in_other_pages(self, make_fleet: Any, request: pytest.FixtureRequest) -> None:
        fleet = make_fleet(prefill=(1, 1), decode=(1, 1), path="slice").start()
        room = fleet.claim(fleet.receive(fleet.room(1, 12, aux=2)))
        busy, gate = threading.Event(), threading.Event()
        request.addfinalizer(gate.set)
        fleet.prefill[0].parts.transfers.run_between(lambda: busy.set() or gate.wait())
        assert busy.wait(60)
        fleet.feed(room)
        (receive,) = room.receives.values()
        transfers = fleet.prefill[0].machine.rooms[1].transfers
        until(lambda: "decode-0" in transfers and transfers["decode-0"].in_flight)
        receive.recall()
        until(lambda: transfers["decode-0"].recalled is not None)
        gate.set()  # the parts are dropped, and not sent before the recall arrives
        assert receive.wait(60) is RoomState.FAILED
        assert (receive.error["rank"], receive.error["code"]) == ("decode-0", "RECALLED")
        assert receive.recalled
        assert receive.released
        assert not room.sends[0].state.finished
        old = room.dst["decode-0"]
        for block in blocks(fleet.decode[0]):
            block[old] = POISON  # and nothing writes there any more
        room.dst["decode-0"] = np.array([fleet.free["decode-0"].pop(0) for _ in range(12)])
        fleet.receive(room)
        assert room.wait() == SUCCESS, room.errors()
        fleet.expect(room)
        fleet.check()
        fleet.settle()
        assert fleet.errors() == []

    def test_a_room_that_has_ended(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1), decode=(1, 1)).start()
        (receive,) = fleet.run(1, 4).receives.values()
        receive.recall()
        assert receive.state is RoomState.SUCCESS
        assert not receive.recalled


class TestDeadlines:
    def test_renew_reaches_the_ranks_of_the_instance(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 2), decode=(1, 1)).start()
        room = fleet.feed(fleet.claim(fleet.room(1, 4)))
        until(lambda: all(agent.machine.knows(1) for agent in fleet.prefill))
        held = [agent.machine.rooms[1] for agent in fleet.prefill]
        deadline = time.monotonic() + 60
        before = [each.since_ns for each in held]
        while any(each.since_ns <= since_ns for each, since_ns in zip(held, before, strict=True)):
            assert time.monotonic() < deadline
            fleet.decode[0].renew([1, 2**64 - 1])
        fleet.receive(room)
        assert room.wait() == SUCCESS, room.errors()

    @pytest.mark.parametrize("rooms", [[-1], ["1"], [1 << 64], range(1 << 17)])
    def test_renew_refuses_what_is_no_room(self, make_fleet: Any, rooms: Any) -> None:
        fleet = make_fleet(prefill=(1, 1), decode=(1, 1)).start()
        with pytest.raises(LocalProtocolError):
            fleet.decode[0].renew(rooms)
        with pytest.raises(LocalProtocolError):
            fleet.prefill[0].renew([1])
