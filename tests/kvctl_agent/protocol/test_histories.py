"""Random histories of the composed machines: whatever the network and the processes do, the oracle holds.

A history is its seed. The rings are tiny, so that gating, wrapping and revoking happen in most of them.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import SECOND, World, direct, staged

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.side import Side
from kvctl_agent.protocol import events as ev


def history(dice: random.Random) -> tuple[World, list[int]]:
    """Two instances and one to three rooms, all at random."""
    prefill = dice.choice([Side(tp=2), Side(tp=2, dp=2), Side(tp=4), Side()])
    decode = dice.choice([Side(), Side(tp=2), Side(dp=2)])
    world = World(
        prefill,
        decode,
        ring=dice.choice([2, 3, 4, 8]),
        chunk_pages=dice.choice([1, 2]),
        choose=dice.choice([staged, staged, direct]),
    )
    if dice.random() < 0.7:
        world.connect()
    rooms = [10 + number for number in range(dice.choice([1, 2, 3]))]
    for room in rooms:
        pages = dice.randrange(6)
        prefix = dice.randrange(pages + 1) if dice.random() < 0.4 else 0
        dp = dice.randrange(decode.dp)
        for tp in range(decode.tp):
            world.receive(room, pages, reader=dp * decode.tp + tp, prefix=prefix, aux=dice.choice([-1, 3]))
        world.send(room, pages, ranks=range(prefill.size), split=[1] if pages > 1 and dice.random() < 0.5 else [])
    return world, rooms


@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 32))
def test_loss_duplication_reordering_and_delay_harm_no_room(seed: int) -> None:
    dice = random.Random(seed)
    world, _ = history(dice)
    loss, copies = dice.choice([0, 0.05, 0.2]), dice.choice([0, 0.05, 0.2])
    world.stir(dice, dice.choice([50, 200, 600]), loss=loss, copies=copies)
    world.settle(ticks=60)
    assert {room.state for room in world.rooms.values()} == {RoomState.SUCCESS}
    assert set(world.sent.values()) == {RoomState.SUCCESS}
    world.check_empty()


def harm(world: World, dice: random.Random, rooms: list[int], loss: float, copies: float) -> None:
    """Something goes wrong."""
    name, room = dice.choice(list(world.machines)), dice.choice(rooms)
    what = dice.choice(["abort", "restart", "restart unproven", "dead for a while", "engine error", "deaf", "stopped"])
    if what == "abort":
        world.feed(name, ev.AbortRoom(room, "enough"))
    elif what == "restart":
        world.restart(name)
    elif what == "restart unproven":
        world.restart(name, proven=False)
    elif what == "dead for a while":
        world.kill(name, proven=dice.random() < 0.5)
        world.stir(dice, 30, loss=loss, copies=copies)
        world.restart(name)
    elif what == "engine error":
        if world.flying:
            write = dice.choice(world.flying)
            order, text = write.order, "the wire broke"
            failed = ev.PartFailed(order.peer, order.room, order.nonce, order.kind, order.key, "BROKEN", text, True)
            world.feed(write.writer, failed)
    elif what == "deaf":
        world.stir(dice, 200, loss=0.9, delay=0.3)
    else:
        world.paused.add(name)
        for _ in range(dice.choice([2, 5, 20])):
            world.stir(dice, 20, loss=loss, copies=copies)
            world.tick(SECOND)
        world.paused.clear()


@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 32))
def test_abort_restart_pause_and_engine_errors_end_every_room_and_leave_nothing(seed: int) -> None:
    dice = random.Random(seed)
    world, rooms = history(dice)
    loss, copies = dice.choice([0, 0.05, 0.2]), dice.choice([0, 0.05, 0.2])
    for _ in range(dice.choice([1, 2, 3])):
        world.stir(dice, dice.choice([5, 20, 50, 100, 200]), loss=loss, copies=copies)
        harm(world, dice, rooms, loss, copies)
    world.settle()
    world.check_empty()


@pytest.mark.parametrize("seed", range(4))
def test_many_rooms_through_a_ring_that_holds_two_parts(seed: int) -> None:
    """No set of rooms can hold each other up for ever."""
    dice = random.Random(seed)
    world = World(Side(tp=2), Side(), ring=2, chunk_pages=1)
    world.connect()
    for room in range(12):
        world.receive(room, 3)
        world.send(room, 3)
    world.stir(dice, 500, loss=0.02)
    world.settle()
    assert {room.state for room in world.rooms.values()} == {RoomState.SUCCESS}
    assert world.d().book.ring.round > 5
    world.check_empty()
