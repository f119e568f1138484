"""Replaced processes: memory that they may still write is kept until they are known to have ended."""

from __future__ import annotations

import msgspec
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.peer import PeerState
from tests.support.protocol.moments import connected, in_flight, pass_time, silence
from tests.support.protocol.simulation import SECOND, TIMING, World, direct, registry

VERSION = msg.PROTOCOL_VERSION


@pytest.mark.parametrize("given_up", [True, False])
@pytest.mark.parametrize("choose", [None, direct])
def test_a_new_incarnation_proves_nothing_about_the_one_before(choose: object, given_up: bool) -> None:
    world = in_flight(choose=choose)
    room = world.rooms["decode-0", 7, 1000]
    first = world.p().local.incarnation
    if given_up:
        silence(world, "prefill-0", 20)
    world.restart("prefill-0", proven=False)
    pass_time(world, 20)
    decode = world.d()
    peer = decode.peers["prefill-0"]
    assert peer.state is PeerState.READY
    assert peer.incarnation == world.p().local.incarnation
    assert room.state is RoomState.FAILED
    assert not room.released, "the process before may be frozen, and write when it goes on"
    assert decode.quarantined_bytes > 0
    assert list(peer.former) == [first]
    answer = msg.RoomDrained(7, 1000)  # the one that came after it has nothing to say about it
    world.feed("decode-0", ev.Received("prefill-0", peer.incarnation, answer))
    assert not room.released
    other = world.receive(8, 2)  # and serves rooms meanwhile
    world.send(8, 2)
    world.settle(until=lambda: other.state is RoomState.SUCCESS)
    assert not room.released
    world.prove()
    assert room.released
    assert decode.quarantined_bytes == 0
    world.tick(SECOND)
    assert not peer.former
    world.settle()
    world.check_empty()


def test_an_earlier_incarnation_that_comes_back_answers_for_itself() -> None:
    world = in_flight()
    room = world.rooms["decode-0", 7, 1000]
    decode, first = world.d(), world.p().local
    silence(world, "prefill-0", 20)
    later = first.incarnation + 1

    def ack(incarnation: int) -> ev.Received:
        return ev.Received("prefill-0", incarnation, msg.HelloAck(VERSION, first.peer_info(), decode.local.incarnation))

    world.feed("decode-0", ack(later))
    assert list(decode.peers["prefill-0"].former) == [first.incarnation]
    for _ in range(20):  # its replacement has ended
        world.tick(SECOND)
    world.feed("decode-0", ack(first.incarnation))
    assert decode.peers["prefill-0"].state is PeerState.READY
    world.settle()
    assert room.released
    world.check_empty()


@pytest.mark.parametrize("former", [False, True])
def test_another_process_cannot_take_over_an_incarnation_whose_end_it_would_prove(former: bool) -> None:
    """A forked child, or a copy of the machine, says the same incarnation, and the first process may be frozen."""
    world = in_flight()
    decode, first = world.d(), world.p().local
    silence(world, "prefill-0", 20)
    peer = decode.peers["prefill-0"]
    if former:
        later = msg.HelloAck(VERSION, first.peer_info(), decode.local.incarnation)
        world.feed("decode-0", ev.Received("prefill-0", first.incarnation + 1, later))
        for _ in range(20):  # and is given up, too
            world.tick(SECOND)
    before = peer.incarnation, peer.info_of(first.incarnation), peer.state, list(peer.former)
    twin = msgspec.structs.replace(first.peer_info(), pid=first.pid + 1)
    ack = msg.HelloAck(VERSION, twin, decode.local.incarnation)
    world.feed("decode-0", ev.Received("prefill-0", first.incarnation, ack))
    assert (peer.incarnation, peer.info_of(first.incarnation), peer.state, list(peer.former)) == before
    assert not world.rooms["decode-0", 7, 1000].released
    assert decode.telemetry.metrics.total("kvctl_control_dropped_total") >= 1


def replaced(world: World) -> int:
    """prefill-0 is frozen with writes in flight, and another process takes its place; the frozen one's incarnation."""
    decode, frozen = world.d(), world.p().local
    silence(world, "prefill-0", 20)
    ack = msg.HelloAck(VERSION, frozen.peer_info(), decode.local.incarnation)
    world.feed("decode-0", ev.Received("prefill-0", frozen.incarnation + 100, ack, b"elsewhere"))
    assert decode.peers["prefill-0"].state is PeerState.READY
    return frozen.incarnation


def test_a_process_that_was_replaced_is_asked_seldom_and_says_itself_that_it_has_drained() -> None:
    world = in_flight()
    room, decode = world.rooms["decode-0", 7, 1000], world.d()
    decode.peers["prefill-0"].route = b"here"
    frozen = replaced(world)
    asked: list[ev.Send] = []
    for _ in range(60):
        world.now_ns += SECOND
        actions = decode.handle(ev.Tick(), world.now_ns)
        asked += [action for action in actions if isinstance(action, ev.Send) and action.route == b"here"]
        decode.peers["prefill-0"].heard_ns = world.now_ns
    assert 3 <= len(asked) <= 6
    assert {type(action.message) for action in asked} == {msg.RoomAbort}
    answer = msg.RoomDrained(7, 1000)
    decode.handle(ev.Received("prefill-0", frozen, msg.RoomDrained(7, 999), b"here"), world.now_ns)
    assert not room.released
    assert decode.quarantined_bytes > 0
    world.flying.clear()
    world.feed("decode-0", ev.Received("prefill-0", frozen, answer, b"here"))
    assert room.released
    assert decode.quarantined_bytes == 0


@pytest.mark.parametrize("drained", [True, False])
def test_a_process_that_was_replaced_says_good_bye(drained: bool) -> None:
    world = in_flight()
    room = world.rooms["decode-0", 7, 1000]
    frozen = replaced(world)
    if drained:
        world.flying.clear()
    world.feed("decode-0", ev.Received("prefill-0", frozen, msg.Bye(drained)))
    assert room.released == drained


def test_a_writer_that_has_given_its_reader_up_answers_what_is_in_flight_all_the_same() -> None:
    """It was frozen, finds everybody silent, and hears from the reader only the question about its room."""
    world = in_flight()
    prefill = world.p()
    prefill.peers["decode-0"].heard_ns -= TIMING.lost_ns
    world.feed("prefill-0", ev.Tick())
    assert prefill.peers["decode-0"].state is PeerState.LOST
    for item in [item for item in world.pool if item.by == "prefill-0" and item.kind in ("begin", "complete")]:
        world.pool.remove(item)
        world.happen(item)
    while events := [item for item in world.pool if item.kind in ("event", "complete") and item.to == "prefill-0"]:
        world.pool.remove(events[0])
        world.happen(events[0])
    abort = msg.RoomAbort(7, 1000, "decode-0", "KV_PEER_LOST", 0, "lost")
    received = ev.Received("decode-0", world.d().local.incarnation, abort)
    (answer,) = (action for action in prefill.handle(received, world.now_ns) if isinstance(action, ev.Send))
    assert answer.message == msg.RoomDrained(7, 1000)
    assert prefill.peers["decode-0"].state is PeerState.LOST, "it must say Hello to be met again"


def test_the_incarnation_that_the_registry_names_replaces_one_that_is_well() -> None:
    world = connected()
    decode, first = world.d(), world.p().local
    later = first.incarnation - 1 or 99
    world.pool.clear()
    world.feed("decode-0", ev.RosterKnown(registry(0), ("prefill-0",), (later,)))
    assert [type(codec.decode(item.what)[1][0]) for item in world.pool if item.kind == "message"] == [msg.Hello]
    ack = msg.HelloAck(VERSION, first.peer_info(), decode.local.incarnation)
    world.feed("decode-0", ev.Received("prefill-0", later + 500, ack))
    assert decode.peers["prefill-0"].incarnation == first.incarnation, "not one that is in no registry"
    world.feed("decode-0", ev.Received("prefill-0", later, ack))
    assert decode.peers["prefill-0"].incarnation == later
    world.feed("decode-0", ev.Received("prefill-0", first.incarnation, ack))
    assert decode.peers["prefill-0"].incarnation == later
