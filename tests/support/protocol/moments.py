"""Builds simulated worlds at particular points of a transfer, with helpers to inspect and advance them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.prefill.send_room import Part
from kvctl_agent.protocol.tag import PartKey
from tests.support.protocol.simulation import SECOND, Item, World


def connected(prefill: ParallelConfig | None = None, decode: ParallelConfig | None = None, **options: Any) -> World:
    """Returns a world whose agents know each other; by default one prefill and one decode rank."""
    world = World(prefill or ParallelConfig(), decode or ParallelConfig(), **options)
    world.connect()
    return world


def asked(pages: int = 2, *, ring: int = 4, prefill: ParallelConfig | None = None) -> World:
    """Returns a world with room 7 opened and prefetched at every writer, and no staging message delivered yet."""
    world = connected(prefill, ring=ring, chunk_pages=1)
    world.receive(7, pages, aux=-1)
    world.flush()
    for rank in range(world.prefill.size):
        world.feed(f"prefill-{rank}", ev.SendRoom(7))
        world.feed(f"prefill-{rank}", ev.Prefetch(7))
    return world


def pass_time(world: World, seconds: int) -> None:
    """Lets seconds pass, with a tick of every machine in each, and delivers everything."""
    for _ in range(seconds):
        world.tick(SECOND)
        world.flush()


def granted(world: World) -> msg.StagingGrants:
    """Answers the staging request in a world from `asked`, and returns the grants, which are not delivered."""
    (request,) = said(world, "decode-0")
    give(world, request, to="decode-0", by="prefill-0")
    (grants,) = said(world, "prefill-0")
    assert isinstance(grants, msg.StagingGrants)
    return grants


def under_way(steps: int, *, ring: int = 2) -> World:
    """Returns a world with two rooms and two writers after `steps` steps of their transfers."""
    world = connected(ParallelConfig(tp=2), ring=ring, chunk_pages=1)
    for room in (7, 8):
        world.receive(room, 4)
        world.send(room, 4)
    for _ in range(steps):
        if places := world.ready():
            world.happen(world.pool.pop(places[0]))
    return world


def in_flight(*, choose: object = None) -> World:
    """Returns a world with one room and a write of prefill-0 that has begun and has not completed."""
    world = connected(ParallelConfig(tp=2), **({"choose": choose} if choose else {}))
    world.receive(7, 4)
    world.send(7, 4)
    while not [write for write in world.flying if write.writer == "prefill-0"]:
        place = next(n for n in world.ready() if world.pool[n].kind != "complete")
        world.happen(world.pool.pop(place))
    return world


def silence(world: World, name: str, seconds: float) -> None:
    """Stops an agent for `seconds` of simulated time while the others continue."""
    world.paused.add(name)
    for _ in range(round(seconds)):
        world.tick(SECOND)
        world.flush()
    world.paused.discard(name)


def messages_to(world: World, name: str, kind: type[msg.Message]) -> list[Item]:
    """Returns the undelivered messages of one type to an agent."""
    return [
        item
        for item in world.pool
        if item.kind == "message" and item.to == name and isinstance(codec.decode(item.what)[1][0], kind)
    ]


def said(world: World, to: str) -> list[msg.Message]:
    """Removes and returns the undelivered messages to an agent."""
    found = [item for item in world.pool if item.kind == "message" and item.to == to]
    world.pool = [item for item in world.pool if item not in found]
    return [message for item in found for message in codec.decode(item.what)[1]]


def give(world: World, *messages: msg.Message, to: str = "prefill-0", by: str = "decode-0") -> None:
    """Delivers messages to agent `to` as if sent by the current incarnation of agent `by`."""
    for message in messages:
        world.feed(to, ev.Received(by, world.machines[by].local.incarnation, message))


def compute(world: World, count: int, *, last: bool = True, rank: int = 0) -> None:
    """Lets the engine of one rank compute the next pages of room 7."""
    name = f"prefill-{rank}"
    first = len(world.source)
    indices = np.arange(first, first + count, dtype=np.int32)
    for position, page in enumerate(indices.tolist()):
        world.source[name, page] = (7, position)
    world.feed(name, ev.SendPages(7, indices, last, 1))


def part(world: World, chunk: int = 0) -> Part:
    return world.p().state.transfers["decode-0", 7, 1000].parts[PartKey(0, chunk, 0, 2)]


def take(world: World, kind: str, to: str | None = None) -> Item:
    """Removes and returns the first item of a kind from the pool; with `to`, the first one for this agent."""
    place = next(n for n, item in enumerate(world.pool) if item.kind == kind and to in (None, item.to))
    return world.pool.pop(place)


def run_until(world: World, kind: str) -> None:
    """Executes items until only items of this kind can happen."""
    while places := [place for place in world.ready() if world.pool[place].kind != kind]:
        world.happen(world.pool.pop(places[0]))
