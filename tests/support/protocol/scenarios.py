"""Draws random worlds and rooms from one seed: any layouts that the plan allows, and any contents of a room."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from kvctl_agent.contract.choices import CP_MODES
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import ModelShape, StateShape
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.peer import Timing
from tests.support.protocol.oracle import Instance, place_of
from tests.support.protocol.simulation import SHAPE, TIMING, Item, World, direct, mixed, staged

SHAPES = {
    "plain": SHAPE,
    "deep": ModelShape(5, 2, 32, 16, 2),
    "latent": ModelShape(4, 1, 64, 0, 2, kind="mla", states=(StateShape("index", (0, 1, 2, 3), 4, 1, 16),)),
    "draft": ModelShape(3, 4, 32, 32, 1, draft=ModelShape(1, 2, 16, 16, 2)),
    "hybrid": ModelShape(
        4,
        2,
        32,
        32,
        1,
        k_scale_bytes=4,
        v_scale_bytes=4,
        draft=ModelShape(2, 1, 32, 32, 1),
        states=(StateShape("conv", (0, 0, 2), 3, 1, 16), StateShape("ssm", (1, 3), 2, 4, 16)),
    ),
}


def side(dice: random.Random, layers: int, most: int, *, cp: Sequence[int]) -> ParallelConfig:
    """Draws a parallel config; pipeline stages often have different numbers of layers.

    Args:
        layers: number of layers to divide.
        most: largest number of ranks.
        cp: CP sizes to choose from.
    """
    while True:
        dp, pp, of_cp, tp = dice.choice([1, 1, 2]), dice.choice([1, 1, 2, 3]), dice.choice(cp), dice.choice([1, 2, 4])
        if dp * pp * of_cp * tp <= most and pp <= layers:
            break
    stages: tuple[int, ...] = ()
    if dice.random() < 0.7 and pp > 1:
        edges = [0, *sorted(dice.sample(range(1, layers), pp - 1)), layers]
        stages = tuple(hi - lo for lo, hi in pairwise(edges))
    return ParallelConfig(dp, pp, of_cp, tp, stages)


def instance(dice: random.Random, layers: int, most: int, *, answers: float) -> Instance:
    return Instance(
        side(dice, layers, most, cp=[1, 2]),
        cp_mode=dice.choice(CP_MODES),
        early_send=dice.random() < 0.6,
        answers=dice.random() < answers,
        introduced=dice.random() < 0.5,
    )


def world(dice: random.Random, *, answers: float = 1.0, timing: Timing = TIMING) -> World:
    """Draws a world with a decode instance and one or two prefill instances of any layouts.

    Args:
        answers: the probability that the registry of the second instance answers.
        timing: periods and deadlines of all ranks.
    """
    shape = SHAPES[dice.choice(list(SHAPES))]
    first = instance(dice, shape.num_layers, 8, answers=1)
    others = [instance(dice, shape.num_layers, 4, answers=answers)] if dice.random() < 0.35 else []
    found = World(
        first.side,
        side(dice, shape.num_layers, 4, cp=[1]),
        cp_mode=first.cp_mode,
        early_send=first.early_send,
        introduced=first.introduced,
        others=others,
        shape=shape,
        ring=dice.choice([2, 3, 4, 8, 24]),
        chunk_pages=dice.choice([1, 2, 3]),
        timing=timing,
        choose=dice.choice([staged, staged, direct, mixed, mixed]),
    )
    if dice.random() < 0.6:
        found.connect()
    return found


def sizes(dice: random.Random, layers: int, sends: int) -> list[int]:
    """Draws the layers per group of each forward, 0 for no groups; an empty list means no groups in any forward."""
    style = dice.choice(["plain", "groups", "groups", "mixed"])
    if style == "plain":
        return []
    if style == "groups":
        return [dice.randint(1, layers)]
    return [dice.choice([0, dice.randint(1, layers)]) for _ in range(sends)]


def forward(world: World, dice: random.Random, room: int, pages: int, number: int, **given: Any) -> None:
    """Lets the prefill engines compute a room, each in forwards of its own; the last forward may have no pages."""
    for rank in world.prefill_ranks(room, number):
        split = [dice.randrange(pages + 1)] if pages and dice.random() < 0.6 else []
        if split and dice.random() < 0.4:
            split.append(dice.randrange(pages - split[0] + 1))
        groups = sizes(dice, world.shape.num_layers, len(split) + 1)
        shuffled = dice if dice.random() < 0.3 else None
        declared = dice.random() < 0.6
        together = dice.random() < 0.5
        told = dice.randint(1, world.shape.num_layers) if dice.random() < 0.3 else 0
        world.send(
            room,
            pages,
            ranks=[rank],
            instance=number,
            split=split,
            groups=groups,
            declare=declared,
            told=told,
            together=together,
            dice=shuffled,
            **given,
        )


def open_and_compute(world: World, dice: random.Random, room: int, *, late: float = 0.0) -> None:
    """Opens one room at the ranks of one dp group and lets one prefill instance compute it.

    Args:
        late: probability that the room is computed before it is opened, and that other steps happen between the calls.
    """
    number = dice.randrange(len(world.instances))
    pages = dice.randrange(7)
    prefix = dice.randrange(pages + 1) if dice.random() < 0.4 else 0
    counts = [dice.randrange(4) for _ in world.shape.states]
    prefill_only = dice.random() < 0.1
    dp = dice.randrange(world.decode.dp)
    readers = [rank for rank in range(world.decode.size) if world.decode.coord(rank).dp == dp]
    computed_first = dice.random() < late
    if computed_first:
        forward(world, dice, room, pages, number, states=counts)
        world.stir(dice, dice.randrange(30))
    for reader in readers:
        wanted = counts if dice.random() < 0.7 else counts[:1] if dice.random() < 0.5 else []
        world.receive(
            room,
            pages,
            reader=reader,
            prefix=prefix,
            aux=dice.choice([-1, 3]),
            instance=number,
            states=wanted,
            prefill_only=prefill_only,
        )
        if dice.random() < late:
            world.stir(dice, dice.randrange(30))
    if not computed_first:
        forward(world, dice, room, pages, number, states=counts)


def preempt(world: World, dice: random.Random, serial: int) -> None:
    """One engine takes the pages of a room back; a prefill engine computes it again, before or after that is done."""
    sending = [
        key for key, state in world.sent.items() if not state.finished and key[1] in world.machines[key[0]].rooms
    ]
    sending = [(name, room) for name, room in sending if world.machines[name].rooms[room].claimed]
    receiving = [room for room in world.rooms.values() if not room.state.finished]
    if sending and (not receiving or dice.random() < 0.6):
        name, room = dice.choice(sending)
        place = place_of(name)
        split = [dice.randrange(world.prompts[name, room][0] + 1)]
        groups = [dice.randint(1, world.shape.num_layers)] if dice.random() < 0.5 else []
        calls = world.recall(room, place.rank, place.instance, serial=serial, split=split, groups=groups)
        if dice.random() < 0.5:
            world.stir(dice, 30)
        world.pool.append(Item("engine", name, name, calls))
    elif receiving:
        expected = dice.choice(receiving)
        world.feed(expected.reader, ev.Recall(expected.room))


def reopen(world: World) -> None:
    """Decode engines open the rooms again that they have recalled, as soon as their pages are released."""
    last = {(room.reader, room.room): room for room in world.rooms.values()}
    for room in last.values():
        if room.released and room.state is RoomState.FAILED and room.failure["text"].endswith("recalled its pages"):
            world.receive(
                room.room,
                room.opening.total_pages,
                reader=place_of(room.reader).rank,
                prefix=room.opening.prefix_pages,
                aux=room.opening.aux_index,
                instance=room.instance,
                states=[len(items) for items in room.opening.states],
                prefill_only=room.opening.prefill_only,
            )
