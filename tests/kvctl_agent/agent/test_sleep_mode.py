"""unregister and register: an engine takes its KV memory back for a while, as in vLLM's sleep mode."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import DeadlineExceeded, LocalProtocolError, MemoryLayoutError
from kvctl_agent.layout.parallel import ParallelConfig
from tests.support.observers import end_observer, observer_pid
from tests.support.polling import until

ASLEEP = "its engine has unregistered its memory"


def new_pool(fleet: Any, agent: Any) -> Any:
    """Returns a pool with the same contents at other addresses, and frees the agent's present pool."""
    side = ParallelConfig(tp=agent.rank.tp_size)
    pool, old = fleet.model.pool(side, agent.rank.tp), agent.pool
    for layer in range(fleet.model.layers):
        for kv in (0, 1):
            pool.segments[0].block(layer, kv)[:] = old.segments[0].block(layer, kv)
    pool.aux[0][:] = old.aux[0]
    assert pool.addresses().segments[0].bases != old.addresses().segments[0].bases
    old.close()  # unmapped: an access from now on would crash the process
    fleet._pools.append(pool)
    return pool


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("moved", [False, True])
def test_memory_goes_and_comes_back(make_fleet: Any, role: str, moved: bool) -> None:
    fleet = make_fleet("nixl", prefill=(1, 2), decode=(1, 1)).start()
    fleet.run(1, 8, aux=1)
    agents = fleet.prefill if role == "prefill" else fleet.decode
    others = fleet.decode if role == "prefill" else fleet.prefill
    before = [agent.incarnation for agent in agents]
    for agent in agents:
        agent.unregister(60)
        assert (agent.accepting, agent.draining, agent.waiting_for()) == (False, False, ASLEEP)
        status = agent.observe.status()
        assert (status["waiting_for"], status["accepting"], status["peers"]) == (ASLEEP, False, {})
        assert status["rooms_finished_total"] == {"Success": 1, "Failed": 0}
        with pytest.raises(LocalProtocolError, match=rf"{agent.name} \({role}, unregistered\) takes no {role} rooms"):
            agent.send(2) if role == "prefill" else agent.receive(2, [0])
    until(lambda: not any(other.observe.status()["peers"].get("ready") for other in others))
    for agent in agents:
        agent.register(new_pool(fleet, agent) if moved else None)
    assert all(agent.incarnation > old for agent, old in zip(agents, before, strict=True))
    for agent in [*agents, *others]:
        agent.wait_ready(60)
    until(lambda: all(agent.observe.status()["peers"] == {"ready": len(others)} for agent in agents))
    fleet.run(2, 8, aux=2)
    fleet.check()
    fleet.settle()
    assert all(agent.observe.status()["rooms_finished_total"] == {"Success": 2, "Failed": 0} for agent in agents)
    assert fleet.errors() == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_room_in_flight_is_named_and_the_agent_goes_on(make_fleet: Any, role: str) -> None:
    fleet = make_fleet(prefill=(1, 1)).start()
    agent = (fleet.prefill if role == "prefill" else fleet.decode)[0]
    room = fleet.claim(fleet.receive(fleet.room(7, 4)))
    until(lambda: room.sends[0].state is RoomState.WAITING_FOR_INPUT)
    with pytest.raises(DeadlineExceeded, match=r"memory cannot be given back, rooms still in flight after 0\.05 s: 7"):
        agent.unregister(0.05)
    assert (agent.accepting, agent.waiting_for()) == (True, None)
    fleet.feed(room)
    assert room.wait() == {RoomState.SUCCESS}, room.errors()
    fleet.expect(room)
    agent.unregister(60)
    agent.register()
    for each in fleet.prefill + fleet.decode:
        each.wait_ready(60)
    fleet.run(8, 4)
    fleet.check()


def test_a_room_that_only_decode_has_opened_fails_with_the_cause(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1)).start()
    room = fleet.receive(fleet.room(7, 4))
    (receive,) = room.receives.values()
    until(lambda: receive.state is RoomState.WAITING_FOR_INPUT)
    fleet.prefill[0].unregister(60)
    assert receive.wait(60) is RoomState.FAILED
    assert receive.error["code"] == "ABORTED"
    assert receive.error["text"] == f"agent prefill-0: {ASLEEP}"
    assert fleet.prefill[0].observe.status()["rooms"] == {}


def test_the_admin_socket_answers_for_the_present_components(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1)).start()
    decode = fleet.decode[0]
    path = decode.admin.path
    decode.begin_drain()
    decode.unregister(60)
    assert (decode.admin.path, decode.observe.hello()["draining"]) == (path, False)
    decode.register()
    assert decode.observe.hello()["draining"]  # as before
    assert decode.observe.hello()["incarnation"] == f"{decode.incarnation:016x}"
    decode.resume()
    decode.wait_ready(60)
    fleet.run(1, 4)
    fleet.check()


def test_the_observer_may_be_replaced_while_there_is_no_control_loop(
    make_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCTL_OBSERVER", "process")
    fleet = make_fleet(prefill=(1, 1)).start()
    decode = fleet.decode[0]
    directory = decode.admin.path.parent
    decode.unregister(60)
    assert decode.admin._wake_agent is None  # closed: its number may be in use again
    before = observer_pid(directory)
    end_observer(directory, signal.SIGKILL)
    until(lambda: observer_pid(directory) not in (None, before) and decode.admin._connection is not None)
    decode.register()
    decode.wait_ready(60)
    assert decode.admin.observer == "process"
    fleet.run(1, 4)
    fleet.check()


def test_a_registry_keeps_its_port(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1))
    fleet.bootstrap = "tcp://127.0.0.1:0"
    fleet.prefill.append(fleet.prefill_agent(0).start())
    endpoint = fleet.bootstrap = fleet.prefill[0].bootstrap
    fleet.prefill[0].unregister(60)
    fleet.prefill[0].register()
    assert fleet.prefill[0].bootstrap == endpoint
    fleet.decode.append(fleet.decode_agent(0).start())
    fleet.decode[0].wait_ready(60)
    fleet.run(1, 4)
    fleet.check()


def test_a_copy_that_does_not_end_keeps_the_memory(make_fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet(prefill=(1, 1)).start()
    prefill = fleet.prefill[0]
    (copier,) = prefill.parts.copiers

    def stuck(this: Any) -> None:
        if this is copier:
            raise DeadlineExceeded("a copy has not ended")

    monkeypatch.setattr(type(copier), "close", stuck)
    with pytest.raises(DeadlineExceeded, match="prefill-0: its control thread or a copy has not ended: its memory"):
        prefill.unregister()
    with pytest.raises(
        LocalProtocolError, match="prefill-0 has not given its memory back: close it and create another"
    ):
        prefill.register()


class TestWrongCalls:
    def test_each_call_has_its_turn(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1))
        decode = fleet.decode_agent(0)
        fleet.decode.append(decode)
        with pytest.raises(LocalProtocolError, match="decode-0 is new"):
            decode.unregister()
        decode.start()
        with pytest.raises(LocalProtocolError, match="decode-0 is running, not unregistered"):
            decode.register()
        decode.unregister()
        for call in (decode.unregister, decode.begin_drain, decode.resume):
            with pytest.raises(LocalProtocolError, match="decode-0 is unregistered"):
                call()
        decode.close()
        with pytest.raises(LocalProtocolError, match="decode-0 is closed"):
            decode.register()

    def test_another_geometry_is_named_and_the_agent_stays_unregistered(self, make_fleet: Any, model: Any) -> None:
        fleet = make_fleet(prefill=(1, 1)).start()
        decode = fleet.decode[0]
        decode.unregister()
        other = model(page_size=8, pages=32).pool(ParallelConfig(), 0)
        with pytest.raises(MemoryLayoutError, match="decode-0: the pool differs from the former one: page_size 4 ≠ 8"):
            decode.register(other)
        other.close()
        assert decode.waiting_for() == ASLEEP
        decode.register()
        decode.wait_ready(60)
        fleet.run(1, 4)
        fleet.check()

    def test_a_decode_agent_without_an_instance_sleeps_too(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1))
        fleet.bootstrap = None
        fleet.decode.append(fleet.decode_agent(0).start())
        fleet.decode[0].unregister()
        fleet.decode[0].register()
        assert fleet.decode[0].observe.status()["not_ready"] is None
