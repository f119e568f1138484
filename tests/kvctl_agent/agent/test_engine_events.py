"""Rooms of pools on a device, whose pages are computed when the engine's event says so; on the stand-in device."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import DeviceError, LocalProtocolError
from tests.support.host_device import JUNK, HostDevice, HostEvent

NEVER = 1 << 60
SUCCESS, FAILED = {RoomState.SUCCESS}, {RoomState.FAILED}


@pytest.fixture
def devices() -> dict[str, HostDevice]:
    return {"prefill": HostDevice(), "decode": HostDevice()}


def launch(agent: Any, pages: np.ndarray) -> HostEvent:
    """A forward that computes these pages: what is in them is junk until its event is done."""
    segment = agent.pool.segments[0]
    blocks = [
        segment.block(layer, kv) for layer in range(segment.shard.layer_lo, segment.shard.layer_hi) for kv in (0, 1)
    ]
    views = [block.reshape(segment.num_slots, -1) for block in blocks]
    truth = [view[pages].copy() for view in views]
    for view in views:
        view[pages] = JUNK

    def compute() -> None:
        for view, values in zip(views, truth, strict=True):
            view[pages] = values

    event: HostEvent = agent.pool.device.engine_event(compute, slow=NEVER)
    return event


def feed(fleet: Any, room: Any, cut: int) -> list[list[HostEvent]]:
    """Two chunks on every prefill rank; for each rank its events."""
    events = []
    for agent, send in zip(fleet.prefill, room.sends, strict=True):
        both = [launch(agent, pages) for pages in (room.src[:cut], room.src[cut:])]
        send.prefetch()
        send.pages(room.src[:cut], event=both[0])
        send.pages(room.src[cut:], last=True, event=both[1])
        send.finish(aux_index=room.aux)
        events.append(both)
    return events


@pytest.mark.parametrize(("transport", "path"), [("loopback", "staged"), ("loopback", "direct"), ("nixl", "staged")])
def test_nothing_moves_before_it_is_computed(make_fleet: Any, devices: Any, transport: str, path: str) -> None:
    fleet = make_fleet(transport, device=devices, path=path, chunk_tokens=16).start()
    room = fleet.claim(fleet.receive(fleet.room(1, 12, aux=2)))
    events = feed(fleet, room, 4)
    for _, second in events:
        second.finish()
    time.sleep(0.05)
    assert all(handle.state is not RoomState.SUCCESS for handle in room.handles)
    fleet.check()  # not a byte has come
    for first, _ in events:
        assert all(receive.event is None for receive in room.receives.values())
        first.finish()
    assert room.wait() == SUCCESS, room.errors()
    fleet.expect(room)
    fleet.check()
    for receive in room.receives.values():
        assert receive.event.done()
        receive.event.wait(stream := object())
        assert receive.event.streams == [stream]
    fleet.settle()
    assert fleet.errors() == []


def test_a_forward_that_failed(make_fleet: Any, devices: Any) -> None:
    fleet = make_fleet(device=devices).start()
    room = fleet.claim(fleet.receive(fleet.room(1, 6)))
    events = feed(fleet, room, 3)
    events[1][0].failure = DeviceError("an illegal memory access was encountered")
    for first, second in events:
        first.finish()
        second.finish()
    assert room.wait() == FAILED
    for error in room.errors():
        assert (error["rank"], error["code"]) == ("prefill-1", "KV_DEVICE")
        assert error["text"] == "room 1: its forward failed: an illegal memory access was encountered"
    fleet.settle()
    fleet.recycle(room)
    again = fleet.run(2, 6)
    fleet.check(but=(room,))
    assert all(receive.event is not None for receive in again.receives.values())


def test_close_does_not_wait_for_forwards(make_fleet: Any, devices: Any) -> None:
    fleet = make_fleet(device=devices, prefill=(1, 1)).start()
    room = fleet.claim(fleet.receive(fleet.room(1, 6)))
    events = feed(fleet, room, 3)
    fleet.prefill[0].close()
    assert room.sends[0].state is RoomState.FAILED
    for first, second in events:
        second.finish()
        first.finish()
    fleet.check()


def test_many_rooms_whose_forwards_end_in_any_order(make_fleet: Any, devices: Any, model: Any) -> None:
    """And a quarter of which are aborted, by either side."""
    dice = random.Random(6)
    fleet = make_fleet(device=devices, model=model(pages=256), chunk_tokens=8, staging_ring_mb=1).start()
    rooms, aborted = [fleet.room(number, dice.randrange(2, 7)) for number in range(40)], []
    pending: list[HostEvent] = []
    lock = threading.Lock()
    fed = threading.Event()

    def run_device() -> None:
        own = random.Random(7)
        while not fed.is_set() or pending:
            with lock:
                event = pending.pop(own.randrange(len(pending))) if pending else None
            if event is not None:
                event.finish()
            time.sleep(own.random() * 5e-4)

    device = threading.Thread(target=run_device)
    device.start()
    used = np.zeros(256, bool)
    for room in rooms:
        # Pages that are being computed for one room are no other's.
        room.src = np.flatnonzero(~used)[: len(room.src)]
        used[room.src] = True
        events = feed(fleet, fleet.claim(fleet.receive(room)), dice.randrange(1, len(room.src)))
        with lock:
            pending += [event for both in events for event in both]
        if dice.random() < 0.25:
            dice.choice(room.handles).abort("enough")
            aborted.append(room)
    fed.set()
    device.join()
    for room in rooms:
        ended = room.wait()
        assert ended == SUCCESS or (room in aborted and ended == FAILED), room.errors()
        if ended == SUCCESS:
            fleet.expect(room)
    fleet.settle()
    fleet.check(but=tuple(aborted))
    assert all(agent.parts.event_poller.waiting == 0 for agent in fleet.prefill)
    assert fleet.errors() == []


class TestHostMemory:
    def test_it_knows_no_events(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1)).start()
        room = fleet.claim(fleet.receive(fleet.room(1, 6)))
        with pytest.raises(LocalProtocolError, match="event= is for pools on a device"):
            room.sends[0].pages(room.src, last=True, event=object())
        fleet.feed(room)
        assert room.wait() == SUCCESS
        assert all(receive.event is None for receive in room.receives.values())
        assert fleet.prefill[0].parts.event_poller is None
