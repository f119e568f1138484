"""Rooms for which a decode engine has no pages: it ends them on the prefill ranks, whatever has been opened by then."""

from __future__ import annotations

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from tests.support.protocol.simulation import SECOND, Instance, World

WHY = "the client went away"


def refuse(world: World, reader: int = 0, instance: int = 0) -> None:
    world.receive(7, 0, reader=reader, aux=-1, instance=instance, refusal=WHY)


def check(world: World, instance: int = 0) -> None:
    """Every rank has the reason of the refusal as its first cause, and nothing is left."""
    failures = [room.failure for room in world.rooms.values() if room.room == 7]
    failures += [world.sent_failures[name, 7] for name in world.names_of(instance)]
    assert {(failure["code"], failure["text"]) for failure in failures} == {("ABORTED", WHY)}
    assert all(room.released for room in world.rooms.values())
    world.check_empty()


@pytest.fixture
def world() -> World:
    made = World(ParallelConfig(tp=2), ParallelConfig(tp=2))
    made.connect()
    return made


@pytest.mark.parametrize("claimed", ["before", "after", "long after"])
def test_it_ends_on_every_prefill_rank_at_once(world: World, claimed: str) -> None:
    if claimed == "before":
        world.send(7, 3)
        world.flush()
    refuse(world)
    world.flush()
    if claimed == "long after":
        world.tick(SECOND)
        world.flush()
    if claimed != "before":
        world.send(7, 3)
        world.flush()
    assert {world.sent[name, 7] for name in world.prefill_names} == {RoomState.FAILED}
    check(world)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("claimed", [False, True])
def test_a_decode_rank_that_has_pages_fails_with_it(world: World, first: int, claimed: bool) -> None:
    for name in world.prefill_names if claimed else ():
        world.feed(name, ev.SendRoom(7))
    for reader in (first, 1 - first):
        if reader:
            room = world.receive(7, 3, reader=1)
        else:
            refuse(world)
        world.flush()
    assert room.state is RoomState.FAILED
    if not claimed:
        world.send(7, 3)
        world.flush()
    check(world)


def test_ranks_that_all_refuse_end_it_once(world: World) -> None:
    world.send(7, 3)
    for reader in (0, 1):
        refuse(world, reader)
    world.flush()
    check(world)


def test_an_instance_that_is_not_connected_yet_is_told_when_it_is() -> None:
    world = World(ParallelConfig(tp=2), ParallelConfig(), others=[Instance(ParallelConfig(tp=2), introduced=False)])
    refuse(world, instance=1)
    world.send(7, 3, instance=1)
    assert world.rooms["decode-0", 7, 1000].state is RoomState.BOOTSTRAPPING
    world.flush()
    assert {world.sent[name, 7] for name in world.names_of(1)} == {RoomState.FAILED}
    check(world, 1)


def test_an_opening_that_is_lost_costs_one_interval_of_resending(world: World) -> None:
    world.send(7, 3)
    world.flush()
    refuse(world)
    world.pool = [item for item in world.pool if not isinstance(codec.decode(item.what)[1][0], msg.RoomOpen)]
    world.flush()
    for _ in range(2):
        world.tick(world.timing.resend_ns)
        world.flush()
    assert {world.sent[name, 7] for name in world.prefill_names} == {RoomState.FAILED}
    check(world)
