"""Staged rooms from end to end with pools on a device, on either side or on both: the same bytes as on the host."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import DeviceError, TransportError
from kvctl_agent.transport.loopback import LoopbackTransport
from tests.support.host_device import HostCopies, HostDevice

SIDES = {"both": ("prefill", "decode"), "prefill": ("prefill",), "decode": ("decode",)}


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize(("prefill", "decode"), [((1, 2), (1, 1)), ((1, 2), (1, 2))])
def test_rooms_land_where_they_should(
    make_fleet: Any, sides: str, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    devices = {role: HostDevice() for role in SIDES[sides]}
    fleet = make_fleet("nixl", prefill=prefill, decode=decode, device=devices, chunk_tokens=16).start()
    for number in range(1, 5):
        fleet.run(number, 11, cuts=(4, 9), aux=number)
        fleet.check()
    fleet.settle()
    assert fleet.errors() == []
    for device in devices.values():
        used = {geometry for begun in device.begun for geometry, _ in begun.batches}
        assert used
        deadline = time.monotonic() + 60
        while not used <= set(device.prepared):
            assert time.monotonic() < deadline, "not all that is used is compiled ahead"
            time.sleep(0.005)


def test_a_configured_number_of_posting_threads_has_no_effect_with_a_pool_on_a_device(make_fleet: Any) -> None:
    settings: dict[str, Any] = {"transport_params": "num_threads=3", "copy_threads": 0}
    fleet = make_fleet("nixl", prefill=(1, 1), decode=(1, 1), device={"prefill": HostDevice()}, **settings).start()
    prefill, decode = fleet.prefill[0], fleet.decode[0]
    assert (prefill.parts.copy_pool.threads, decode.parts.copy_pool.threads) == (0, 3)
    for agent, times in ((prefill, 1), (decode, 0)):
        texts = [event["text"] for event in agent.observe.events()["events"] if event["kind"] == "transport"]
        assert len([text for text in texts if "num_threads of transport_params has no effect" in text]) == times


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_copy_that_fails_fails_its_room_by_name_and_frees_everything(make_fleet: Any, side: str) -> None:
    devices = {"prefill": HostDevice(), "decode": HostDevice()}
    fleet = make_fleet("loopback", device=devices).start()
    fleet.run(1, 4)
    devices[side].fail_next = 1
    room = fleet.feed(fleet.claim(fleet.receive(fleet.room(2, 4))))
    assert room.wait() == {RoomState.FAILED}
    assert {error["code"] for error in room.errors()} == {"KV_DEVICE"}
    assert {error["rank"].split("-")[0] for error in room.errors()} == {side}
    fleet.settle()
    fleet.run(3, 4)
    fleet.check(but=(room,))


def test_agents_of_a_lost_device_end(make_fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything fails there, from one room on; those in flight fail by name, and closing is still closing."""
    devices = {"prefill": HostDevice(), "decode": HostDevice()}
    fleet = make_fleet("loopback", device=devices).start()
    fleet.run(1, 4)
    for device in devices.values():
        device.fail_next = 1 << 30
    rooms = [fleet.feed(fleet.claim(fleet.receive(fleet.room(number, 4)))) for number in range(2, 8)]
    for room in rooms:
        assert room.wait() == {RoomState.FAILED}
        assert {error["code"] for error in room.errors()} == {"KV_DEVICE"}
    fleet.settle()

    def refuse(self: HostCopies) -> None:
        raise DeviceError("an illegal address was met")

    monkeypatch.setattr(HostCopies, "close", refuse)
    for agent in fleet.prefill + fleet.decode:
        agent.close()
        assert agent.parts.context.closed


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_agent_that_cannot_be_made_gives_its_memory_back(
    make_fleet: Any, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, regions: Any) -> None:
        raise TransportError("the network card cannot reach GPU memory")

    monkeypatch.setattr(LoopbackTransport, "register", refuse)
    device = HostDevice()
    made: list[Any] = []
    allocate = device.allocate
    device.allocate = lambda *of: made.append(allocate(*of)) or made[-1]  # type: ignore[method-assign,func-returns-value]
    fleet = make_fleet("loopback", device={role: device})
    with pytest.raises(TransportError, match="cannot reach GPU memory"):
        fleet.prefill_agent(0) if role == "prefill" else fleet.decode_agent(0)
    pool, staging = made
    assert (pool._closed, staging._closed) == (False, True)
