"""Rooms that the prefill engine never finishes, and rooms with a message that can never be sent: both sides fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from tests.support.folded import folded
from tests.support.protocol.simulation import TIMING, World, direct

SECOND = 1_000_000_000
ROOM = 7


def opened(pages: int, *, prefix: int = 0, aux: int = -1, **options: Any) -> tuple[World, Any]:
    """A room that its prefill engine has claimed and its decode ranks have opened; 2 pages a chunk."""
    world = World(options.pop("prefill", ParallelConfig()), ParallelConfig(), choose=direct, **options)
    world.connect()
    for name in world.prefill_names:
        world.feed(name, ev.SendRoom(ROOM))
        world.source.update({(name, page): (ROOM, page) for page in range(pages)})
    room = world.receive(ROOM, pages, prefix=prefix, aux=aux)
    world.flush()
    return world, room


def give(world: World, pages: range, *, last: bool, name: str = "prefill-0") -> None:
    world.feed(name, ev.SendPages(ROOM, np.array(pages, np.int32), last, 1))
    world.flush()


def ends(world: World, room: Any) -> set[RoomState]:
    return {room.state, *(handle for (_, number), handle in world.sent.items() if number == ROOM)}


def notes(world: World) -> list[str]:
    events = folded(world.p().telemetry).recorder.since(None, 100)["events"]
    return [event["text"] for event in events if event["kind"] == "room-unfinished"]


def test_the_last_pages_are_the_end_where_nothing_else_is_wanted() -> None:
    world, room = opened(3)
    give(world, range(2), last=False)
    assert not room.state.finished
    give(world, range(2, 3), last=True)
    assert ends(world, room) == {RoomState.SUCCESS}
    world.feed("prefill-0", ev.Finish(ROOM, 1, 1))  # which may come all the same
    world.settle()
    assert ends(world, room) == {RoomState.SUCCESS}
    assert notes(world) == []
    world.check_empty()


def test_a_room_that_ends_with_the_last_pages_ends_once() -> None:
    """Its decode rank had all of it in its cache, and said so before the engine finished."""
    world, room = opened(2, prefix=2)
    assert room.state is RoomState.SUCCESS
    pages = ev.SendPages(ROOM, np.arange(2, dtype=np.int32), True, 1)
    actions = world.p().handle(ev.Finish(ROOM, -1, 1, (), pages), world.now_ns)
    states = [action.state for action in actions if isinstance(action, ev.StateChanged)]
    assert states.count(RoomState.SUCCESS) == 1
    assert not world.p().rooms
    assert not folded(world.p().telemetry).transfers.in_transfer()


def test_also_on_a_rank_that_owes_nothing() -> None:
    world, room = opened(2, prefix=2)
    assert room.state is RoomState.SUCCESS
    give(world, range(2), last=True)
    assert ends(world, room) == {RoomState.SUCCESS}
    world.check_empty()


@pytest.mark.parametrize(
    ("pages", "prefix", "given", "text"),
    [
        (4, 0, 4, "the engine gave no last pages: all layers have 4, and none with last=True"),
        (2, 2, 0, "the engine gave no last pages: all layers have 0, and none with last=True"),
    ],
    ids=["whole chunks", "nothing owed"],
)
def test_a_room_that_is_received_succeeds_at_the_deadline(pages: int, prefix: int, given: int, text: str) -> None:
    """Decodes has begun to use it; a failure now would end the room in two ways. Until then its pages are kept."""
    world, room = opened(pages, prefix=prefix)
    if given:
        give(world, range(given), last=False)
    assert room.state is RoomState.SUCCESS
    began_ns = world.now_ns
    while not world.sent["prefill-0", ROOM].finished:
        assert not world.p().rooms[ROOM].released
        world.tick(SECOND)
        world.flush()
    assert TIMING.waiting_ns <= world.now_ns - began_ns < TIMING.waiting_ns + 5 * SECOND
    assert ends(world, room) == {RoomState.SUCCESS}
    (note,) = notes(world)
    assert note.startswith("room 7 is received by every decode rank, but for ")
    assert note.endswith(text)
    world.settle()
    world.check_empty()


def test_without_the_final_parts_both_ends_fail_and_name_finish() -> None:
    world, room = opened(3, aux=1)
    give(world, range(3), last=True)
    while not room.state.finished:
        world.tick(SECOND)
        world.flush()
    world.settle()
    assert ends(world, room) == {RoomState.FAILED}
    assert world.sent_failures["prefill-0", ROOM]["text"].endswith("finish() was not called")


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (True, "at prefill-0 finish() was not called"),
        (
            False,
            "at prefill-0 the engine gave no last pages: all layers have 3, and none with last=True",
        ),
    ],
)
def test_where_decode_gives_up_first_prefill_says_what_its_engine_has_not_passed(last: bool, text: str) -> None:
    world, room = opened(3, aux=1)
    give(world, range(3), last=last)
    while not room.state.finished:
        world.p().rooms[ROOM].since_ns = world.now_ns  # prefill's own deadline is later
        world.tick(SECOND)
        world.flush()
    world.settle()
    assert ends(world, room) == {RoomState.FAILED}
    failure = world.sent_failures["prefill-0", ROOM]
    assert failure["rank"] == "decode-0"
    assert "did not arrive" in failure["text"]
    assert failure["text"].endswith(text)


class TestUnsendable:
    @pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
    def test_the_room_fails_on_every_rank_with_the_cause(self, name: str) -> None:
        world, room = opened(2, aux=1)
        peer = "decode-0" if name == "prefill-0" else "prefill-0"
        world.feed(name, ev.Unsendable(peer, ROOM, room.nonce, f"to {peer}: RoomOpen cannot be encoded"))
        world.settle()
        assert ends(world, room) == {RoomState.FAILED}
        failure = world.sent_failures["prefill-0", ROOM]
        assert (failure["rank"], failure["code"]) == (name, "MESSAGE_UNSENDABLE")
        world.check_empty()

    @pytest.mark.parametrize("event", [ev.Unsendable("nobody", ROOM, 1, ""), ev.Unsendable("prefill-0", ROOM, 1, "")])
    def test_another_life_of_the_number_is_not_meant(self, event: ev.Event) -> None:
        world, room = opened(2)
        world.feed("decode-0", event)
        give(world, range(2), last=True)
        assert ends(world, room) == {RoomState.SUCCESS}
