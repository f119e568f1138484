"""Staging credits: a writer requests little more than its share of a ring, and computed rooms come first."""

from __future__ import annotations

import numpy as np

from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.prefill.staging_credits import writer_quota
from tests.support.protocol.moments import connected
from tests.support.protocol.simulation import World

ROOMS = range(7, 17)


def inputs(prefill: ParallelConfig, decode: ParallelConfig) -> PlanInputs:
    return PlanInputs(ModelShape(4, 8, 16, 16, 2), 1, 2, prefill, decode, "rank0")


def test_a_share_is_the_ring_by_the_ranks_that_write_to_it_for_one_room() -> None:
    assert writer_quota(inputs(ParallelConfig(tp=4), ParallelConfig(dp=4)), 64) == 16
    assert writer_quota(inputs(ParallelConfig(tp=2, pp=2), ParallelConfig(tp=2)), 64) == 32
    assert writer_quota(inputs(ParallelConfig(), ParallelConfig(tp=4)), 64) == 64


def busy(writers: int, ring: int) -> World:
    """Ten rooms, a unit of each from every writer, opened and asked for before any forward is done."""
    world = connected(ParallelConfig(tp=writers), ring=ring, chunk_pages=1)
    for room in ROOMS:
        world.receive(room, 1, aux=-1)
    world.flush()
    for room in ROOMS:
        for name in world.prefill_names:
            world.feed(name, ev.SendRoom(room))
            world.feed(name, ev.Prefetch(room))
    return world


def compute(world: World, name: str, room: int) -> None:
    """This room's forward is done."""
    world.source[name, 10_000 + room] = (room, 0)
    world.feed(name, ev.SendPages(room, np.array([10_000 + room], np.int32), True, world.now_ns))
    world.feed(name, ev.Finish(room, -1, world.now_ns))


def asked_for(world: World, name: str) -> list[int]:
    """Rooms for which this writer has asked since we last looked, in order; the requests are taken off the wire."""
    mine = [item for item in world.pool if item.by == name and item.kind == "message"]
    world.pool = [item for item in world.pool if item not in mine]
    messages = [message for item in mine for message in codec.decode(item.what)[1]]
    return [message.room for message in messages if isinstance(message, msg.StagingRequest)]


def test_ahead_of_its_forwards_a_writer_asks_for_its_share_of_the_ring() -> None:
    world = busy(writers=2, ring=4)
    assert asked_for(world, "prefill-0") == [7, 8]
    assert asked_for(world, "prefill-1") == [7, 8]


def test_what_is_computed_may_ask_for_as_much_again_and_goes_before_what_is_not() -> None:
    world = busy(writers=2, ring=4)
    asked_for(world, "prefill-0")
    for room in (16, 15, 14):
        compute(world, "prefill-0", room)
    assert asked_for(world, "prefill-0") == [16, 15], "14 waits for its turn, and 9 to 13 behind it"
    world.feed("prefill-0", ev.AbortRoom(16, "enough"))
    assert asked_for(world, "prefill-0") == [], "half of what it may ask for is still on its way"
    world.feed("prefill-0", ev.AbortRoom(15, "enough"))
    assert asked_for(world, "prefill-0") == [14]


def test_an_abort_gives_back_what_was_asked_for() -> None:
    world = busy(writers=2, ring=4)
    for room in ROOMS:
        world.feed("decode-0", ev.AbortRoom(room, "enough"))
    world.settle()
    (credits,) = world.p(0).state.credits.values()
    assert (credits.asked_bytes, len(credits)) == (0, 0)


def test_what_is_computed_does_not_wait_for_the_forward_of_a_large_room_that_asked_ahead() -> None:
    """That forward may never come: its pages may be those that are to be freed by what is computed."""
    world = connected(ParallelConfig(tp=2), ring=4, chunk_pages=1)
    world.receive(7, 8, aux=-1)  # eight units of each writer, twice the ring
    world.receive(8, 1, aux=-1)
    world.flush()
    for room in (7, 8):
        world.feed("prefill-0", ev.SendRoom(room))
        world.feed("prefill-0", ev.Prefetch(room))
    assert asked_for(world, "prefill-0") == [7]
    compute(world, "prefill-0", 8)
    assert asked_for(world, "prefill-0") == [8]


def test_what_is_computed_does_not_wait_for_the_rest_of_a_room_of_which_one_chunk_is() -> None:
    world = connected(ParallelConfig(tp=2), ring=4, chunk_pages=1)
    world.receive(7, 8, aux=-1)
    world.receive(8, 1, aux=-1)
    world.flush()
    for room in (7, 8):
        world.feed("prefill-0", ev.SendRoom(room))
    world.feed("prefill-0", ev.SendPages(7, np.arange(3, dtype=np.int32), False, world.now_ns))
    assert asked_for(world, "prefill-0") == [7]
    compute(world, "prefill-0", 8)
    assert asked_for(world, "prefill-0") == [8]


def test_a_room_whose_end_is_told_by_finish_alone_has_its_turn() -> None:
    """Its parts were ready before anybody knew that no more would come."""
    world = busy(writers=2, ring=4)
    asked_for(world, "prefill-0")
    for room in (16, 15):
        world.feed("prefill-0", ev.SendPages(room, np.array([10_000 + room], np.int32), False, world.now_ns))
    assert asked_for(world, "prefill-0") == []
    world.feed("prefill-0", ev.Finish(16, -1, world.now_ns))
    assert asked_for(world, "prefill-0") == [16]


def test_it_goes_on_however_much_was_asked_for_ahead() -> None:
    world = connected(ParallelConfig(tp=2), ring=4, chunk_pages=1)
    world.receive(7, 8, aux=-1)
    for room in (8, 9, 10):
        world.receive(room, 1, aux=-1)
    world.flush()
    world.feed("prefill-0", ev.SendRoom(7))
    world.feed("prefill-0", ev.Prefetch(7))
    for room in (8, 9, 10):
        world.feed("prefill-0", ev.SendRoom(room))
        compute(world, "prefill-0", room)
    assert asked_for(world, "prefill-0") == [7, 8, 9]
    for room in (8, 9):
        world.feed("prefill-0", ev.AbortRoom(room, "enough"))
    assert asked_for(world, "prefill-0") == [10]
