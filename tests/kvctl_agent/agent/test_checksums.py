"""Checksums between living agents: each path's parts are compared, and one that differs fails its room by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.memory.checksum import part_checksum
from tests.support.host_device import HostDevice

PATIENCE_S = 60  # for what takes milliseconds on a quiet machine


@pytest.fixture(params=["slice", "staged"])
def fleet(make_fleet: Any, request: pytest.FixtureRequest) -> Any:
    """Two writers of half the heads each, one reader."""
    return make_fleet("loopback", path=request.param, checksum=True).start()


@pytest.mark.parametrize("differs", [False, True])
def test_what_is_in_the_pages_is_compared_with_what_was_sent(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, differs: bool
) -> None:
    taken: list[int] = []

    def checksum(*of: Any) -> int:
        taken.append(part_checksum(*of) ^ differs)
        return taken[-1]

    monkeypatch.setattr("kvctl_agent.runtime.arrivals.part_checksum", checksum)
    room = fleet.claim(fleet.receive(fleet.room(7, 8)))
    fleet.feed(room)
    assert room.wait(PATIENCE_S) == {RoomState.FAILED if differs else RoomState.SUCCESS}, room.errors()
    fleet.settle()
    if differs:
        assert {handle.error["code"] for handle in room.handles} == {"KV_CHECKSUM_MISMATCH"}
    else:
        assert len(taken) >= 2  # one of each writer
        fleet.expect(room)
        fleet.check()


def test_a_reader_on_a_device_takes_parts_as_they_are(make_fleet: Any) -> None:
    fleet = make_fleet("loopback", prefill=(1, 1), device={"decode": HostDevice()})
    fleet.prefill.append(fleet.prefill_agent(0, checksum=True).start())
    fleet.decode.append(fleet.decode_agent(0).start())
    fleet.decode[0].wait_ready(PATIENCE_S)
    room = fleet.feed(fleet.claim(fleet.receive(fleet.room(7, 8, aux=2))))
    assert room.wait(PATIENCE_S) == {RoomState.SUCCESS}, room.errors()
    fleet.settle()
    fleet.expect(room)
    fleet.check()
