"""Whole agents under faults: rooms succeed with every byte right, or fail with a cause; none hangs, nothing stays."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvctl.lab.faults.agent import faulty_agent
from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import parse_faults
from kvctl_agent.agent import Agent
from kvctl_agent.contract.states import RoomState

BAD_LINE = "control-loss=20%,control-dup=20%,control-reorder=20%,control-truncate=2%,control-garbage=2%"
QUICK = {"resend_s": 0.05, "heartbeat_s": 0.05, "chunk_tokens": 16}


def start(make_fleet: Any, transport: str = "loopback", seed: int = 0, **config: Any) -> Any:
    """A fleet of agents under faults, not started; `fleet.faults` has those of each agent, by its name."""
    faults: dict[str, FaultInjector] = {}

    def make(*, name: str, from_birth: str = "", **arguments: Any) -> Agent:
        faults[name] = FaultInjector(name, seed)
        for fault in parse_faults(from_birth) if from_birth else ():
            faults[name].set(fault)
        return faulty_agent(faults[name], name=name, **arguments)

    fleet = make_fleet(transport, prefill=(1, 2), decode=(2, 1), kind=make, **QUICK, **config)
    fleet.faults = faults
    return fleet


def set_all(fleet: Any, spec: str, role: str = "") -> None:
    for agent in fleet.prefill + fleet.decode:
        for fault in parse_faults(spec):
            if agent.role.startswith(role):
                fleet.faults[agent.name].set(fault)


def run_rooms(fleet: Any, count: int = 24, codes: tuple[str, ...] = ()) -> int:
    """Rooms of six pages; those that fail must have one of the codes. How many succeeded, all of them verified."""
    rooms = []
    for number in range(count):
        room = fleet.feed(fleet.claim(fleet.receive(fleet.room(number, 4))), (1, 2))
        rooms.append(room)
    failed = []
    for room in rooms:
        states = room.wait(60)
        assert states <= {RoomState.SUCCESS, RoomState.FAILED}, (room.number, states)
        assert all(handle.released for handle in room.handles), room.number
        if states == {RoomState.SUCCESS}:
            fleet.expect(room)
        else:
            assert {error["code"] for error in room.errors()} <= set(codes), room.errors()
            failed.append(room)
    for agent in fleet.prefill + fleet.decode:
        fleet.faults[agent.name].clear()
    fleet.settle()
    fleet.check(but=tuple(failed) or ())
    assert fleet.errors() == []
    return count - len(failed)


def struck(fleet: Any, name: str) -> int:
    return sum(fleet.faults[agent.name].counts().get(name, 0) for agent in fleet.prefill + fleet.decode)


@pytest.mark.parametrize("transport", ["loopback", "nixl"])
def test_a_bad_line(make_fleet: Any, transport: str) -> None:
    fleet = start(make_fleet, transport, seed=5).start()
    set_all(fleet, BAD_LINE)
    assert run_rooms(fleet) == 24
    for name in ("control-loss", "control-dup", "control-reorder", "control-truncate", "control-garbage"):
        assert struck(fleet, name), name
    assert fleet.total(fleet.prefill + fleet.decode, "kvctl_control_resends_total") > 0


def test_a_bad_line_from_the_first_hello_on(make_fleet: Any) -> None:
    fleet = start(make_fleet, seed=6, from_birth=BAD_LINE).start()
    assert run_rooms(fleet, 8) == 8


@pytest.mark.parametrize("transport", ["loopback", "nixl"])
@pytest.mark.parametrize("path", ["staged", "slice"])
def test_lost_and_doubled_tags_are_made_up_for(make_fleet: Any, transport: str, path: str) -> None:
    fleet = start(make_fleet, transport, path=path).start()
    set_all(fleet, "notify-loss=30%,notify-dup=30%")
    assert run_rooms(fleet, 12) == 12
    assert struck(fleet, "notify-loss")
    assert struck(fleet, "notify-dup")


@pytest.mark.parametrize("transport", ["loopback", "nixl"])
@pytest.mark.parametrize("path", ["staged", "slice"])
def test_engine_errors_fail_their_rooms_alone(make_fleet: Any, transport: str, path: str) -> None:
    fleet = start(make_fleet, transport, seed=3, path=path).start()
    set_all(fleet, "write-error=5%,write-doubt=10%", "prefill")
    succeeded = run_rooms(fleet, 24, codes=("KV_TRANSPORT",))
    assert struck(fleet, "write-doubt")
    assert 0 < succeeded < 24


def test_bytes_that_land_late_meet_nobody_elses_pages(make_fleet: Any, model: Any) -> None:
    """Pages of a failed room are given out again as soon as they are released, while late writes are about."""
    fleet = start(make_fleet, model=model(pages=16), seed=8, path="slice").start()
    set_all(fleet, "write-doubt=30%", "prefill")
    outcomes = []
    for number in range(30):
        room = fleet.feed(fleet.claim(fleet.receive(fleet.room(number, 4))))
        outcomes.append(room.wait(60))
        assert all(handle.released for handle in room.handles)
        fleet.recycle(room)
        if outcomes[-1] == {RoomState.SUCCESS}:
            fleet.expect(room)
            bad = []
        else:
            bad = [room]
        fleet.check(but=tuple(bad))
        for failed in bad:  # whatever it holds now, nothing may change it any more
            for agent in fleet.decode:
                for layer in range(fleet.model.layers):
                    for kv in (0, 1):
                        block = agent.pool.segments[0].block(layer, kv)
                        fleet.image[agent.name, layer, kv].reshape(16, -1)[failed.dst.get(agent.name, [])] = (
                            block.reshape(16, -1)[failed.dst.get(agent.name, [])]
                        )
    assert {RoomState.SUCCESS} in outcomes
    assert {RoomState.FAILED} in outcomes
    for agent in fleet.prefill:
        fleet.faults[agent.name].clear()
    fleet.settle()


def test_what_has_landed_waits_for_its_copy_until_the_fault_ends(make_fleet: Any) -> None:
    fleet = start(make_fleet).start()
    set_all(fleet, "slow-scatter=1h", role="decode")
    room = fleet.feed(fleet.claim(fleet.receive(fleet.room(1, 4))), (1, 2))
    decode = fleet.decode[1]
    deadline = time.monotonic() + 60
    while not (here := decode.parts.machine.rooms.get(1)) or not 0 < here.record.planned == here.record.landed:
        assert time.monotonic() < deadline, "all of the room has landed"
        time.sleep(0.005)
    while not fleet.faults[decode.name].counts().get("slow-scatter"):
        assert time.monotonic() < deadline, "the copy is held up"
        time.sleep(0.005)
    assert here.record.scattered == 0
    fleet.faults[decode.name].clear()
    assert room.wait(60) == {RoomState.SUCCESS}
    fleet.expect(room)
    fleet.settle()
    fleet.check()


def test_the_wall_clock_jumps_and_comes_back(make_fleet: Any) -> None:
    fleet = start(make_fleet).start()
    agent = fleet.decode[0]
    moment = time.monotonic_ns()
    before = agent.telemetry.clock.wall_ns(moment)
    set_all(fleet, "clock-jump=-1h", "decode")
    assert agent.telemetry.clock.wall_ns(moment) == before - 3600 * 10**9
    assert run_rooms(fleet, 4) == 4
    assert agent.telemetry.clock.wall_ns(moment) == before


def test_an_incarnation_is_minted_by_the_clock_that_the_agent_has(make_fleet: Any) -> None:
    fleet = start(make_fleet)
    now = fleet.decode_agent(0)
    early = fleet.decode_agent(1, from_birth="clock-jump=-1h")
    fleet.decode = [now, early]
    assert abs(early.observe.hello()["now_ns"] - time.time_ns() + 3600 * 10**9) < 60 * 10**9
    assert 3590 * 10**9 < now.incarnation - early.incarnation < 3700 * 10**9
