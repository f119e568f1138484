"""Forwards that run on a device: their deadline, and their failure, which fails only their room."""

from __future__ import annotations

import numpy as np

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from tests.support.protocol.moments import connected, pass_time
from tests.support.protocol.simulation import TIMING, World, direct

SECOND = 1_000_000_000


def launched(*, forwards: int = 1, stages: int = 1, early_send: bool = True) -> World:
    """Rooms 7 and 8 of two pages are open, and forwards of room 7 run."""
    world = connected(ParallelConfig(pp=stages), choose=direct, early_send=early_send)
    for room in (7, 8):
        world.receive(room, 2)
    world.flush()
    world.sent["prefill-0", 7] = RoomState.BOOTSTRAPPING
    world.source.update({("prefill-0", page): (7, page) for page in (0, 1)})
    world.feed("prefill-0", ev.SendRoom(7))
    for _ in range(forwards):
        world.feed("prefill-0", ev.Launched(7))
    return world


def done(first: int, count: int, *, last: bool, event: bool = True) -> ev.SendPages:
    return ev.SendPages(7, np.arange(first, first + count, dtype=np.int32), last, 1, launched=event)


def test_a_forward_that_does_not_end_is_what_the_room_was_stuck_for() -> None:
    world = launched()
    pass_time(world, TIMING.waiting_ns // SECOND - 1)
    world.now_ns += 2 * SECOND
    world.feed("prefill-0", ev.Tick())  # it looks first; decode would have been stuck for the pages
    failure = world.p().rooms[7].failure
    assert failure is not None
    assert failure["text"].endswith(" s: the event of its forward is not done")


def test_one_of_several() -> None:
    world = launched(forwards=2)
    world.feed("prefill-0", done(0, 1, last=False))
    room = world.p().rooms[7]
    assert room.launched == 1
    world.feed("prefill-0", done(1, 1, last=True))
    assert room.launched == 0


def test_pages_that_an_early_stage_holds_back_are_counted_once() -> None:
    world = launched(stages=2, early_send=False)
    world.feed("prefill-0", done(0, 2, last=True))
    room = world.p().rooms[7]
    assert (room.launched, len(room.deferred)) == (0, 1)
    world.feed("prefill-0", ev.Finish(7, -1, 2))
    assert (room.launched, room.computed.complete) == (0, True)


def test_the_first_forward_began_when_it_was_told() -> None:
    world = connected(choose=direct)
    world.receive(7, 2)
    world.flush()
    world.feed("prefill-0", ev.SendRoom(7))
    world.feed("prefill-0", ev.Prefetch(7, (), 5))
    world.feed("prefill-0", ev.Launched(7))
    world.feed("prefill-0", ev.Prefetch(7, (), 9))  # of the next chunk, while the first one still runs
    assert world.p().rooms[7].record.forward_begun_at == 5


def test_a_forward_that_failed_fails_its_room_everywhere() -> None:
    world = launched()
    world.feed("prefill-0", ev.ForwardFailed(7, "its forward failed: an illegal address was met"))
    world.settle(until=lambda: world.rooms["decode-0", 7, 1000].state.finished)
    failure = world.rooms["decode-0", 7, 1000].failure
    assert (failure["code"], failure["rank"]) == ("KV_DEVICE", "prefill-0")
    assert failure["text"] == "room 7: its forward failed: an illegal address was met"
    world.send(8, 2)
    world.settle()
    assert world.rooms["decode-0", 8, 1001].state is RoomState.SUCCESS
    world.check_empty()


def test_what_is_told_of_an_ended_room_changes_nothing() -> None:
    world = launched()
    world.feed("prefill-0", ev.AbortRoom(7, "enough"))
    for event in (ev.Launched(7), ev.ForwardFailed(7, "late"), done(0, 2, last=True)):
        world.feed("prefill-0", event)
    world.settle(until=lambda: world.rooms["decode-0", 7, 1000].state.finished)
    assert world.rooms["decode-0", 7, 1000].failure["text"] == "enough"
    for event in (ev.Launched(7), ev.ForwardFailed(7, "later")):
        world.feed("prefill-0", event)
