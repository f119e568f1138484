"""Names and identities: two processes with one name, and strangers that use the name of a peer."""

from __future__ import annotations

import msgspec
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.peer import PeerState
from tests.support.protocol.moments import connected
from tests.support.protocol.simulation import SECOND, TIMING, World

VERSION = msg.PROTOCOL_VERSION

TWIN = 77


def hello(world: World) -> msg.Hello:
    who = msgspec.structs.replace(world.d().local.peer_info(), pid=4711, hostname="node-2")
    return msg.Hello(VERSION, who)


def answers(world: World, event: ev.Event) -> list[ev.Send]:
    actions = world.p().handle(event, world.now_ns)
    return [action for action in actions if isinstance(action, ev.Send)]


def test_a_second_process_under_the_name_of_one_that_is_well_is_refused_and_told_why() -> None:
    world = connected()
    first = world.d().local.incarnation
    (sent,) = answers(world, ev.Received("decode-0", TWIN, hello(world), b"route of the twin"))
    assert sent.route == b"route of the twin", "the answer goes to the one that asked"
    ack = sent.message
    assert isinstance(ack, msg.HelloAck)
    assert ack.to == TWIN
    assert ack.taken.startswith(
        f"the name decode-0 is in use at prefill-0 by process {world.d().local.pid} on its host"
    )
    assert "give every agent its own name" in ack.taken
    assert world.p().peers["decode-0"].incarnation == first
    room = world.receive(7, 2)
    world.send(7, 2)
    world.settle()
    assert room.state is RoomState.SUCCESS, "the first one is served as before"


def test_the_next_process_is_let_in_when_the_one_before_is_silent() -> None:
    world = connected()
    assert answers(world, ev.Received("decode-0", TWIN, hello(world)))[0].message.taken  # type: ignore[attr-defined]
    world.paused.add("decode-0")
    world.pool = [item for item in world.pool if item.by != "decode-0"]
    for _ in range(TIMING.suspect_ns // SECOND + 1):
        world.tick(SECOND)
    world.feed("prefill-0", ev.Received("decode-0", TWIN, hello(world)))
    assert world.p().peers["decode-0"].incarnation == TWIN


def test_the_next_process_is_let_in_at_once_when_the_end_of_the_one_before_is_proven() -> None:
    world = connected()
    world.feed("prefill-0", ev.PeerDead("decode-0", world.d().local.incarnation, "process has ended"))
    world.feed("prefill-0", ev.Received("decode-0", TWIN, hello(world)))
    assert world.p().peers["decode-0"].incarnation == TWIN


def refusal(world: World) -> ev.Received:
    prefill = world.p().local
    ack = msg.HelloAck(VERSION, prefill.peer_info(), world.d().local.incarnation, taken="the name decode-0 is in use")
    return ev.Received("prefill-0", prefill.incarnation, ack)


def test_a_decode_rank_whose_name_is_in_use_waits_a_while_and_then_fails_its_rooms_with_the_reason() -> None:
    world = World(ParallelConfig(), ParallelConfig())
    room = world.receive(7, 2)
    world.pool.clear()
    world.feed("decode-0", refusal(world))
    assert room.state is RoomState.BOOTSTRAPPING, "it may be its own last life, whose silence will show"
    for _ in range(2 * TIMING.suspect_ns // SECOND + 1):
        world.tick(SECOND)
        world.pool.clear()
    world.feed("decode-0", refusal(world))
    assert room.failure["code"] == "KV_COMPAT_MISMATCH"
    assert "the name decode-0 is in use" in room.failure["text"]
    assert world.d().peers["prefill-0"].state is PeerState.REFUSED


def test_a_decode_rank_whose_name_was_in_use_for_a_moment_goes_on_as_if_nothing_had_been() -> None:
    world = World(ParallelConfig(), ParallelConfig())
    room = world.receive(7, 2)
    world.feed("decode-0", refusal(world))
    world.send(7, 2)
    world.settle()
    assert room.state is RoomState.SUCCESS


@pytest.mark.parametrize("message", [msg.Heartbeat(1), msg.RoomAbort(7, 1000, "x", "x", 0, "x"), msg.Bye(True)])
def test_what_a_stranger_says_in_a_peers_name_and_incarnation_changes_nothing_but_a_counter(message: object) -> None:
    world = connected()
    world.receive(7, 2)
    world.flush()
    prefill, life = world.p(), world.d().local.incarnation
    before = prefill.peers["decode-0"].heard_ns, prefill.rooms[7].state
    world.now_ns += SECOND
    assert prefill.handle(ev.Received("decode-0", life, message, b"a stranger"), world.now_ns) == []  # type: ignore[arg-type]
    assert (prefill.peers["decode-0"].heard_ns, prefill.rooms[7].state) == before
    assert prefill.telemetry.metrics.total("kvctl_control_dropped_total") == 1


def test_a_stranger_cannot_say_hello_for_a_peer() -> None:
    world = connected()
    prefill, life = world.p(), world.d().local.incarnation
    assert prefill.handle(ev.Received("decode-0", life, hello(world), b"a stranger"), world.now_ns) == []
    assert prefill.peers["decode-0"].route == b""
    assert prefill.handle(ev.Received("somebody", TWIN, hello(world), b"a stranger"), world.now_ns) == []
    assert "somebody" not in prefill.peers


def test_an_opening_that_was_meant_for_the_process_before_is_not_taken() -> None:
    """Decodes does not know yet that it has reached another one, and would not wait for it to drain."""
    world = connected()
    opening = msg.RoomOpen(7, 1000, b"", 0, 0, world.p().peers["decode-0"].wire, to=world.p().local.incarnation + 1)
    event = ev.Received("decode-0", world.d().local.incarnation, opening)
    assert world.p().handle(event, world.now_ns) == []
    assert not world.p().rooms
