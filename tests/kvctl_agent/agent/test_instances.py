"""A decode agent that is given its prefill instances later, by connect or with its first room."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import ConfigError, LocalProtocolError


def decode_alone(fleet: Any, bootstrap: Any = None) -> Any:
    """Starts the fleet's decode agent without a prefill instance."""
    known, fleet.bootstrap = fleet.bootstrap, bootstrap
    fleet.decode.append(fleet.decode_agent(0).start())
    fleet.bootstrap = known
    return fleet.decode[0]


@pytest.mark.parametrize("bootstrap", [None, [], ()])
def test_it_is_ready_for_rooms_that_name_an_instance(make_fleet: Any, bootstrap: Any) -> None:
    fleet = make_fleet(prefill=(1, 1))
    decode = decode_alone(fleet, bootstrap)
    assert (decode.bootstrap, decode.serving(), decode.accepting) == (None, [], True)
    decode.wait_ready(0)
    status = decode.observe.status()
    assert (status["waiting_for"], status["not_ready"]) == (None, None)
    assert decode.observe.bootstrap() == []
    with pytest.raises(LocalProtocolError, match="room 7: no prefill instance is known to decode-0: pass prefill="):
        decode.receive(7, [0])
    assert decode.receive(7, [0], fake=True).state is RoomState.SUCCESS
    fleet.settle()


@pytest.mark.parametrize("started", [True, False])
def test_connect_names_an_instance(make_fleet: Any, started: bool) -> None:
    fleet = make_fleet(prefill=(1, 1))
    if started:
        decode = decode_alone(fleet)
        decode.connect(fleet.bootstrap)
    else:
        known, fleet.bootstrap = fleet.bootstrap, None
        decode = fleet.decode_agent(0)
        fleet.decode.append(decode)
        fleet.bootstrap = known
        decode.connect(known)
        decode.start()
    decode.connect(fleet.bootstrap)  # nothing changes
    assert decode.bootstrap == fleet.bootstrap
    assert decode.waiting_for() == f"no answer from the registry at {fleet.bootstrap}"
    assert decode.serving() == []
    fleet.prefill.append(fleet.prefill_agent(0).start())
    decode.wait_ready(60)
    assert decode.serving() == [fleet.bootstrap]
    assert [row["registry"] for row in decode.observe.bootstrap()] == [fleet.bootstrap]
    fleet.run(7, 8)
    fleet.check()


def test_the_first_room_names_an_instance(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1))
    fleet.prefill.append(fleet.prefill_agent(0).start())
    decode = decode_alone(fleet)
    room = fleet.room(7, 8)
    room.receives["decode-0"] = decode.receive(7, room.dst["decode-0"], prefill=fleet.bootstrap)
    fleet.feed(fleet.claim(room))
    assert room.wait() == {RoomState.SUCCESS}, room.errors()
    fleet.expect(room)
    decode.wait_ready(60)
    assert decode.serving() == [fleet.bootstrap]
    fleet.run(8, 4)  # of the same instance, without naming it
    fleet.check()


def test_wrong_calls(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1))
    fleet.prefill.append(fleet.prefill_agent(0).start())
    with pytest.raises(LocalProtocolError, match=r"agent prefill-0 \(prefill\) connects to no prefill instance"):
        fleet.prefill[0].connect(fleet.bootstrap)
    decode = decode_alone(fleet)
    with pytest.raises(ConfigError, match="is not an endpoint"):
        decode.connect("10.0.0.1:7000")
    with pytest.raises(LocalProtocolError, match="page 64 is outside the pool"):
        decode.receive(7, [64], prefill=fleet.bootstrap)
    assert decode.waiting_for() is None
    decode.close()
    with pytest.raises(LocalProtocolError, match="agent decode-0 is closed"):
        decode.connect(fleet.bootstrap)


@pytest.mark.parametrize("bootstrap", [None, [], ["ipc:///tmp/a/b", "ipc:///tmp/c/b"]])
def test_a_prefill_rank_has_exactly_one_registry(make_fleet: Any, bootstrap: Any) -> None:
    fleet = make_fleet(prefill=(1, 1))
    fleet.bootstrap = bootstrap
    with pytest.raises(ConfigError, match="bootstrap endpoints: a prefill agent needs exactly one"):
        fleet.prefill_agent(0)


def test_disconnect_forgets_an_instance_and_connect_finds_it_again(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 2)).start()
    (decode,) = fleet.decode
    fleet.run(7, 8)
    room = fleet.claim(fleet.receive(fleet.room(8, 4)))
    decode.disconnect(fleet.bootstrap)
    assert room.wait() == {RoomState.FAILED}
    assert room.receives["decode-0"].error["text"] == (
        f"room 8: its prefill instance at {fleet.bootstrap} was disconnected by the engine"
    )
    fleet.settle()
    deadline = time.monotonic() + 60
    while decode.observe.peers():
        assert time.monotonic() < deadline, decode.observe.peers()
        time.sleep(0.01)
    assert (decode.bootstrap, decode.waiting_for()) == (None, None)
    assert (decode.serving(), decode.observe.bootstrap()) == ([], [])
    assert not decode.parts.control._registries.sockets()
    decode.disconnect(fleet.bootstrap)  # nothing changes
    fleet.recycle(room)
    decode.connect(fleet.bootstrap)
    decode.wait_ready(60)
    fleet.run(9, 8)
    fleet.check(but=(room,))


def test_wrong_calls_of_disconnect(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1)).start()
    with pytest.raises(LocalProtocolError, match=r"agent prefill-0 \(prefill\) connects to no prefill instance"):
        fleet.prefill[0].disconnect(fleet.bootstrap)
    decode = fleet.decode[0]
    decode.disconnect("ipc:///tmp/kvctl-nobody")
    assert decode.serving() == [fleet.bootstrap]
    decode.close()
    with pytest.raises(LocalProtocolError, match="agent decode-0 is closed"):
        decode.disconnect(fleet.bootstrap)
