"""Rooms from end to end, byte for byte: cached prefixes, states, many at once. Layouts: `test_layout_pairs.py`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState


@pytest.fixture
def fleet(make_fleet: Any) -> Any:
    return make_fleet("loopback", prefill=(1, 2), decode=(1, 1), chunk_tokens=16).start()


PATHS = pytest.mark.parametrize("path", ["slice", "staged"])


class TestPrefix:
    @PATHS
    @pytest.mark.parametrize("prefix", [3, 8])
    def test_cached_pages_are_not_sent(self, fleet: Any, path: str, prefix: int) -> None:
        fleet.set_path(path)
        fleet.run(1, 11, (6, 9), prefix=prefix, aux=1)
        fleet.check()
        sent = fleet.total(fleet.prefill, "kvctl_part_bytes_total")
        assert sent == (11 - prefix) * page_bytes(fleet)

    def test_prefill_reads_the_prefix_when_decode_has_opened_the_room(self, fleet: Any) -> None:
        room = fleet.claim(fleet.room(1, 6, prefix=5))
        assert [send.prefix_tokens for send in room.sends] == [None, None]
        fleet.receive(room)
        wait(lambda: all(send.state is RoomState.WAITING_FOR_INPUT for send in room.sends))
        assert [send.prefix_tokens for send in room.sends] == [5 * fleet.model.page_size] * 2
        fleet.feed(room)
        assert room.wait() == {RoomState.SUCCESS}
        assert [send.prefix_tokens for send in room.sends] == [5 * fleet.model.page_size] * 2


class TestOrder:
    def test_states_reach_the_callback_in_order_and_never_go_back(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1))
        told: list[tuple[str, RoomState]] = []
        sent: list[bool] = []

        def on_state(handle: Any, state: RoomState) -> None:
            sent.append(handle.sent)
            told.append(("prefill-0", state))

        prefill = fleet.prefill_agent(0, on_state=on_state).start()
        decode = fleet.decode_agent(0, on_state=lambda handle, state: told.append(("decode-0", state))).start()
        fleet.prefill, fleet.decode = [prefill], [decode]
        decode.wait_ready(60)
        fleet.run(1, 9)
        wait(lambda: len([1 for name, _ in told if name == "prefill-0"]) >= 5)
        life = [RoomState.BOOTSTRAPPING, RoomState.WAITING_FOR_INPUT, RoomState.TRANSFERRING, RoomState.SUCCESS]
        assert [state for name, state in told if name == "prefill-0"] == [*life[:3], RoomState.TRANSFERRING, life[3]]
        assert sent == [False, False, False, True, True]
        seen = [state for name, state in told if name == "decode-0"]
        assert seen == sorted(seen)
        assert (seen[0], seen[-1]) == (life[0], life[-1])


class TestManyRooms:
    def test_two_hundred_at_once_through_a_ring_that_holds_a_few(self, make_fleet: Any, model: Any) -> None:
        """Each room needs 128 KiB of staging from each writer, the ring has 1 MiB: most are gated at any time."""
        wide = model(heads=4, k_dim=128, v_dim=128, page_size=8, pages=1700, layers=2)
        fleet = make_fleet(
            "nixl", prefill=(1, 2), decode=(1, 1), model=wide, path="staged", chunk_tokens=32, resend_s=1.0
        ).start()
        rooms = [fleet.receive(fleet.room(number, 8)) for number in range(200)]
        order = np.random.default_rng(5).permutation(200)
        for number in order:
            fleet.feed(fleet.claim(rooms[number]), (3,))
        for room in rooms:
            assert room.wait(60) == {RoomState.SUCCESS}, room.errors()
            fleet.expect(room)
        fleet.check()
        fleet.settle()
        assert fleet.errors() == []
        staging = fleet.decode[0].observe.staging()["ring"]
        assert staging["high_water_bytes"] == staging["size_bytes"], "the ring never was the bottleneck"
        assert staging["granted_total"] == 200 * 2 * 2
        assert staging["round"] > 20
        assert fleet.total(fleet.prefill, "kvctl_fallbacks_total") == 0


class TestRingTooSmall:
    def test_staging_off_needs_no_ring_and_no_grant(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 2), decode=(1, 1), staging="off", path="auto").start()
        assert fleet.decode[0].parts.ring is None
        assert fleet.decode[0].observe.status()["ring"] is None
        fleet.run(1, 9, aux=1)
        fleet.check()
        assert fleet.total(fleet.prefill, "kvctl_parts_total", "slice") == 2
        assert fleet.total(fleet.prefill + fleet.decode, "kvctl_control_messages_total", "out", "StagingRequest") == 0


def page_bytes(fleet: Any) -> int:
    m = fleet.model
    total: int = m.layers * m.page_size * m.heads * (m.k_dim + m.v_dim) * m.dtype_bytes
    return total


def eventually(condition: Any, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    return True


def wait(condition: Any, timeout_s: float = 60.0) -> None:
    assert eventually(condition, timeout_s)


@pytest.mark.parametrize("prefix", [0, 2])
def test_send_says_at_once_that_every_decode_rank_has_opened_the_room(make_fleet: Any, prefix: int) -> None:
    fleet = make_fleet("loopback", prefill=(1, 2), decode=(1, 2)).start()
    room = fleet.receive(fleet.room(1, 8, prefix=prefix))
    wait(lambda: all(agent.parts.machine.opened_prefix(1) is not None for agent in fleet.prefill))
    for agent in fleet.prefill:
        send = agent.send(1)
        assert (send.state, send.prefix_tokens) == (RoomState.WAITING_FOR_INPUT, prefix * fleet.model.page_size)
        room.sends.append(send)
    fleet.feed(room)
    assert room.wait() == {RoomState.SUCCESS}, room.errors()
    fleet.expect(room)
