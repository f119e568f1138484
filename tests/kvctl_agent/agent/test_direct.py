"""Rooms that go direct between agents of one process, whose pools are on the stand-in device.

Ranks in processes of their own need a real device: the stand-in can map nothing of another process.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.device.base import Export
from kvctl_agent.errors import ConfigError, DeviceError
from kvctl_agent.memory.region import Region
from kvctl_agent.protocol.messages import MAX_SHARED
from tests.support.host_device import HostDevice
from tests.support.polling import until

FAILED, SUCCESS = {RoomState.FAILED}, {RoomState.SUCCESS}


@pytest.fixture
def devices() -> dict[str, HostDevice]:
    return {"prefill": HostDevice(lane="nvlink"), "decode": HostDevice()}


def written(fleet: Any, path: str) -> int:
    total: int = fleet.total(fleet.prefill, "kvctl_parts_total", path)
    return total


class Gate:
    """Lets no kernel of a prefill rank end before it is opened."""

    def __init__(self, agent: Any) -> None:
        self.open = threading.Event()
        self.begun = 0
        copies = agent.parts.transfers._paths["direct"]._copies
        copies.begin = self._gated(copies.begin)

    def _gated(self, begin: Any) -> Any:
        def gated(*args: Any, **named: Any) -> Any:
            event = begin(*args, **named)
            done, self.begun = event.done, self.begun + 1
            event.done = lambda: self.open.is_set() and done()
            return event

        return gated


@pytest.mark.parametrize("path", ["direct", "auto"])
@pytest.mark.parametrize(("prefill", "decode"), [((1, 2), (1, 1)), ((1, 1), (1, 2))])
def test_rooms_land_where_they_should(
    make_fleet: Any, devices: Any, path: str, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    fleet = make_fleet("nixl", prefill=prefill, decode=decode, path=path, device=devices, staging="off").start()
    for number in range(1, 5):
        fleet.run(number, 10, cuts=(4,), aux=number)
    fleet.settle()
    fleet.check()
    assert written(fleet, "direct") > 0
    assert written(fleet, "direct") == fleet.total(fleet.prefill, "kvctl_parts_total")
    assert fleet.total(fleet.decode, "kvctl_parts_total", "in-place") == written(fleet, "direct")
    assert not fleet.errors()
    rows = [row for agent in fleet.prefill for row in agent.observe.peers()]
    assert {(row["lane_direct"], row["lane_why_not"]) for row in rows} == {("nvlink", None)}
    assert all(device.index == -1 for device in devices.values())


def test_auto_measures_and_then_weighs(make_fleet: Any, devices: Any) -> None:
    fleet = make_fleet(prefill=(1, 1), path="auto", device=devices, staging_ring_mb=1).start()
    chooser = fleet.prefill[0].parts.chooser
    until(lambda: chooser.model is not None)
    assert chooser.model.direct.us_per_part > 0
    assert "direct" in fleet.events("calibration")[0]
    assert devices["prefill"].prepared, "kernels were compiled before the first part"
    fleet.run(1, 8)
    fleet.settle()
    fleet.check()
    (mapping,) = devices["prefill"].mappings
    fleet.prefill[0].close()
    assert mapping.closed


class TestWhyNot:
    def shown(self, fleet: Any) -> str:
        (row,) = fleet.prefill[0].observe.peers()
        assert row["lane_direct"] is None
        text: str = row["lane_why_not"]
        return text

    def test_a_pool_in_host_memory_has_no_such_path(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1))
        with pytest.raises(ConfigError, match="direct"):
            fleet.prefill_agent(0, path="direct")
        fleet.start()
        with pytest.raises(ConfigError, match="direct"):
            fleet.prefill[0].set_path("direct")
        lane = fleet.prefill[0].parts.connections.by_peer["decode-0"]
        assert (lane.mapping, lane.why_not) == (None, "this rank's pool is host memory")

    def test_a_fixed_path_fails_its_parts_and_auto_takes_another(self, make_fleet: Any, devices: Any) -> None:
        fleet = make_fleet(prefill=(1, 1), path="direct", device={"prefill": devices["prefill"]})
        fleet.config.pop("path")
        fleet.prefill.append(fleet.prefill_agent(0, path="direct").start())
        fleet.decode.append(fleet.decode_agent(0).start())
        for agent in fleet.prefill + fleet.decode:
            agent.wait_ready(60)
        assert self.shown(fleet) == "decode-0's pool is host memory"
        room = fleet.feed(fleet.claim(fleet.receive(fleet.room(1, 4))))
        assert room.wait() == FAILED
        (texts,) = {error["text"] for error in room.errors()}
        assert "by direct: there is no direct path to decode-0" in texts
        assert texts.endswith("decode-0's pool is host memory")
        fleet.recycle(room)
        fleet.set_path("auto")
        fleet.run(2, 4)
        fleet.settle()
        fleet.check()
        assert not written(fleet, "direct")

    def test_what_cannot_be_exported_is_said_on_both_sides(self, make_fleet: Any, devices: Any) -> None:
        devices["decode"].why_no_export = "expandable segments; set expandable_segments:False"
        fleet = make_fleet(prefill=(1, 1), device=devices).start()
        assert self.shown(fleet) == "expandable segments; set expandable_segments:False"
        ours, theirs = fleet.events("direct")
        assert ours == "connection to decode-0: not direct: expandable segments; set expandable_segments:False"
        assert theirs == "writers cannot map this rank's memory: expandable segments; set expandable_segments:False"
        fleet.run(1, 4)
        fleet.check()

    def test_more_allocations_than_a_hello_may_name(self, make_fleet: Any, devices: Any) -> None:
        one = Export(1 << 40, 4096, "ipc", b"handle", "GPU-1")
        devices["decode"].export = lambda regions: [one] * (MAX_SHARED + 1)
        fleet = make_fleet(prefill=(1, 1), device=devices).start()
        assert self.shown(fleet) == "its memory consists of 4097 allocations, and writers map 4096 at most: use one"
        fleet.run(1, 4)
        fleet.check()


def test_no_kernel_measures_beyond_what_a_peer_exported(make_fleet: Any, devices: Any) -> None:
    fleet = make_fleet(prefill=(1, 1), path="direct", device=devices).start()
    lanes = fleet.prefill[0].parts.connections
    scratch, mapping = lanes._scratch["decode-0"], lanes.by_peer["decode-0"].mapping
    assert lanes._measure_direct(mapping, scratch).us_per_part > 0
    begun = len(devices["prefill"].begun)
    for claimed in (Region(scratch.addr, 1 << 40), Region(1 << 41, scratch.nbytes)):
        with pytest.raises(DeviceError, match="lies in nothing that the peer exported"):
            lanes._measure_direct(mapping, claimed)
    assert len(devices["prefill"].begun) == begun
    assert not mapping.users


class TestLifetime:
    def test_a_peer_that_goes_while_a_kernel_is_out_is_unmapped_behind_it(self, make_fleet: Any, devices: Any) -> None:
        fleet = make_fleet(prefill=(1, 1), path="direct", device=devices).start()
        writer = fleet.prefill[0]
        gate = Gate(writer)
        room = fleet.feed(fleet.claim(fleet.receive(fleet.room(1, 8))))
        until(lambda: gate.begun)
        fleet.decode[0].close(1.0)
        until(lambda: room.sends[0].error)
        until(lambda: not writer.parts.connections.reaches("decode-0"))
        (mapping,) = devices["prefill"].mappings
        assert writer.parts.machine.rooms, "its pages are held as long as they are read"
        assert not mapping.closed
        gate.open.set()
        assert room.sends[0].wait(60) is RoomState.FAILED
        assert mapping.closed

    def test_a_new_life_has_a_mapping_of_its_own(self, make_fleet: Any, devices: Any) -> None:
        fleet = make_fleet(prefill=(1, 1), path="direct", device=devices).start()
        writer = fleet.prefill[0]
        gate = Gate(writer)
        lost = fleet.feed(fleet.claim(fleet.receive(fleet.room(1, 8))))
        until(lambda: gate.begun)
        fleet.decode.pop().close(1.0)
        until(lambda: lost.sends[0].error)
        fleet.decode.append(fleet.decode_agent(0).start())
        fleet.decode[0].wait_ready(60)
        until(lambda: writer.parts.connections.reaches("decode-0"))
        old, new = devices["prefill"].mappings
        assert not old.closed
        gate.open.set()
        fleet.run(2, 8)
        until(lambda: old.closed)
        fleet.settle()
        fleet.check()
        assert not new.closed
        assert not fleet.errors()
