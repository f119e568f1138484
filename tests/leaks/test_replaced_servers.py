"""Prefill servers that come, serve one room and end, each at its own address, as pods do: decode forgets them."""

from __future__ import annotations

import gc
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvctl_agent import Agent, Rank, RoomState
from tests.support.polling import until
from tests.support.server import CONFIG, Server, pool

WAIT_S = 60.0
SERVERS, FIRST = 4, 1
DEAD = 50
SLACK = SERVERS - FIRST - 2  # UCX may open a connection late; a leak is one descriptor for each server


@pytest.fixture
def decode() -> Iterator[Agent]:
    """A decode agent whose requests name the prefill servers."""
    agent = Agent(role="decode", rank=Rank(), pool=pool(), name="decode-0", transport="nixl", **CONFIG)
    with agent.start():
        yield agent


@pytest.fixture
def serve(decode: Agent) -> Iterator[Callable[[str], Server]]:
    with ExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp")))

        def start(name: str) -> Server:
            server = Server("prefill", name, decode.settings["transport"], sockets)
            stack.enter_context(server.process)
            stack.callback(server.process.kill)
            return server

        yield start


def served(decode: Agent, server: Server, room: int) -> None:
    receive = decode.receive(room, [3], prefill=server.endpoint)
    server.say(str(room))
    assert receive.wait(WAIT_S) is RoomState.SUCCESS, receive.error


def forgotten(decode: Agent) -> None:
    until(
        lambda: not (decode.machine.instances or decode.machine.peers),
        "decode has forgotten all servers",
        within_s=WAIT_S,
    )


def descriptors() -> int:
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize("how", ["close", "kill"])
def test_servers_that_are_replaced_under_new_names(decode: Agent, serve: Callable[[str], Server], how: str) -> None:
    first = 0
    for number in range(SERVERS):
        server = serve(f"prefill-pod{number}")
        served(decode, server, number + 1)
        server.end(how)
        if number == FIRST:
            forgotten(decode)
            time.sleep(0.5)  # UCX closes connections at leisure
            first = descriptors()
    forgotten(decode)
    until(lambda: descriptors() <= first + SLACK, f"no more than {first + SLACK} descriptors are open", within_s=WAIT_S)
    assert not decode.parts.control_channel.sockets()
    assert not decode.parts.control._registries.sockets()
    assert decode.telemetry.metrics.total("kvctl_peers_forgotten_total") == SERVERS


def test_a_frozen_server_that_is_forgotten_gives_its_memory_back_and_serves_again(
    decode: Agent, serve: Callable[[str], Server]
) -> None:
    server = serve("prefill-frozen")
    served(decode, server, 1)
    receive = decode.receive(2, [4], prefill=server.endpoint)
    server.say("2 claim")
    until(lambda: receive.state is RoomState.WAITING_FOR_INPUT, "the room is open", within_s=WAIT_S)
    server.process.send_signal(signal.SIGSTOP)
    until(lambda: not decode.machine.instances, "decode has forgotten the instance", within_s=WAIT_S)
    assert (receive.state, receive.released) == (RoomState.FAILED, False)
    assert [row["needed"] for row in decode.observe.peers()] == [False]
    server.process.send_signal(signal.SIGCONT)
    until(lambda: receive.released, "the server has drained", within_s=WAIT_S)
    forgotten(decode)
    served(decode, server, 3)


def test_dead_servers_that_requests_name_are_given_up(decode: Agent, serve: Callable[[str], Server]) -> None:
    server = serve("prefill-well")
    served(decode, server, 1)
    before = descriptors()
    rooms = [decode.receive(100 + number, [], prefill=f"tcp://127.0.9.{number}:9") for number in range(DEAD)]
    served(decode, server, 2)
    assert {room.wait(WAIT_S) for room in rooms} == {RoomState.FAILED}
    until(
        lambda: decode.machine.instances == (server.endpoint,), "decode has forgotten the dead servers", within_s=WAIT_S
    )
    until(lambda: descriptors() < before + DEAD // 2, "their descriptors are closed", within_s=WAIT_S)
    assert len(decode.parts.control_channel.sockets()) == 1
    served(decode, server, 3)
