"""Final parts: aux rows and state components, their elected writers, and invalid ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import ModelShape, StateShape
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from tests.support.protocol.moments import run_until
from tests.support.protocol.simulation import TIMING, World, direct

CONV = StateShape("conv", (0, 1), 3, 1, 16)
SSM = StateShape("ssm", (0, 2, 3), 2, 4, 16)
INDEX = StateShape("index", (0, 1, 2, 3), 4, 1, 16)
HYBRID = ModelShape(4, 2, 32, 32, 2, states=(CONV, SSM, INDEX))


def world_of(prefill: ParallelConfig | None = None, decode: ParallelConfig | None = None, **options: Any) -> World:
    world = World(
        prefill or ParallelConfig(), decode or ParallelConfig(), **{"shape": HYBRID, "choose": direct, **options}
    )
    world.connect()
    return world


def test_a_room_says_which_components_it_wants() -> None:
    world = world_of()
    some = world.receive(7, 2, states=(0, 2), aux=-1)
    none = world.receive(8, 2, aux=-1)
    for room in (7, 8):
        world.send(room, 2, states=(1, 2, 3))
    world.settle()
    assert {some.state, none.state} == {RoomState.SUCCESS}
    assert some.segments == {0, 2}
    assert none.segments == {0}


def test_success_waits_for_every_final_part() -> None:
    world = world_of()
    room = world.receive(7, 1, states=(1, 1, 1))
    world.send(7, 1, states=(1, 1, 1))
    run_until(world, "tag")
    tags = [item.what for item in world.pool if item.kind == "tag"]
    world.pool.clear()
    assert len(tags) == 5
    for tag in tags[:-1]:
        world.feed("decode-0", ev.Arrived(Tag.unpack(tag), 1))
        world.feed("decode-0", ev.Arrived(Tag.unpack(tag), 1))
        assert room.state is RoomState.TRANSFERRING
    assert world.d().telemetry.metrics.total("kvctl_tags_dropped_total", "duplicate") == 4
    world.feed("decode-0", ev.Arrived(Tag.unpack(tags[-1]), 1))
    assert room.state is RoomState.SUCCESS


def test_a_state_that_never_comes_is_named_at_the_deadline() -> None:
    world = world_of()
    room = world.receive(7, 1, states=(1, 1), aux=-1)
    world.send(7, 1, states=(1, 1))
    while world.now_ns < 2 * TIMING.waiting_ns and not room.state.finished:
        world.pool = [i for i in world.pool if i.kind != "begin" or i.what.order.kind is not PartKind.STATE]
        if places := world.ready():
            world.happen(world.pool.pop(places[0]))
        else:
            world.tick(TIMING.resend_ns)
    assert "of prefill-0 did not arrive" in room.failure["text"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((1, 2, 3), None),
        ((1, 1, 3), "decode-0 expects 2 items of state ssm, finish() gave 1"),
        ((1, 3, 3), "decode-0 expects 2 items of state ssm, finish() gave 3"),
        ((1,), "decode-0 expects 2 items of state ssm, finish() gave 0"),
        ((), "decode-0 expects 1 items of state conv, finish() gave 0"),
    ],
)
def test_a_count_of_items_that_differs_names_the_component_and_both_counts(
    given: tuple[int, ...], text: str | None
) -> None:
    world = world_of()
    room = world.receive(7, 2, states=(1, 2, 3), aux=-1)
    other = world.receive(8, 2, aux=-1)
    world.send(7, 2, states=given)
    world.send(8, 2)
    world.settle()
    assert other.state is RoomState.SUCCESS
    if text is None:
        assert room.state is RoomState.SUCCESS
    else:
        assert room.failure["code"] == "KV_PLAN_MISMATCH"
        assert text in room.failure["text"]
    world.check_empty()


@pytest.mark.parametrize(
    ("opening", "text"),
    [
        ({"states": (1, 3)}, "items of state ssm: 107..109 is outside decode-0's pool of 109"),
        ({"aux": 5}, "aux row 5 is outside decode-0's pool"),
        ({"first_page": 1999}, "pages 0..2: 1999..2000 is outside decode-0's pool of 2000"),
        ({"states": (1, 1, 1, 1)}, "items of 4 state components, the model has 3"),
    ],
)
def test_what_is_not_in_the_readers_pool_is_refused_at_open(opening: dict[str, Any], text: str) -> None:
    world = world_of(num_pages=2000, state_slots=109, aux_slots=5)
    room = world.receive(7, 2, **{"aux": 4, **opening})
    world.flush()
    assert text in room.failure["text"]
    assert room.released
    assert not world.p().open_rooms


class TestPrefillOnly:
    """A request that has no decode forward: its pages stay, what follows them moves."""

    def test_the_decode_side_need_not_know_how_long_the_prompt_is(self) -> None:
        world = world_of()
        room = world.receive(7, 0, prefill_only=True)
        world.send(7, 5, groups=[1])
        world.settle(ticks=1)
        assert room.state is RoomState.SUCCESS

    def test_without_anything_that_follows_it_succeeds_when_all_have_accepted(self) -> None:
        world = world_of()
        room = world.receive(7, 0, prefill_only=True, aux=-1)
        world.flush()
        assert room.state is RoomState.SUCCESS
        world.send(7, 5)
        world.settle()
        world.check_empty()


def test_an_acknowledged_state_does_not_stand_for_a_part_of_the_same_key() -> None:
    """A state's key has its segment in the place of the chunk: the part's own tag would never be told again."""
    shape = ModelShape(2, 2, 32, 32, 2, states=(StateShape("conv", (0, 1), 3, 1, 16),))
    world = world_of(shape=shape, chunk_pages=1)
    world.receive(7, 2, states=(1,))
    world.send(7, 2, states=(1,))
    run_until(world, "tag")
    world.pool.clear()
    key = PartKey(0, 1, 0, 2)
    transfer = world.p().state.transfers["decode-0", 7, 1000]
    assert key in transfer.parts
    assert (PartKind.STATE, key) in transfer.finals
    state = Tag(PartKind.STATE, world.d().local.incarnation, 7, 1000, 0, key).pack()
    world.feed("prefill-0", ev.Received("decode-0", world.d().local.incarnation, msg.PartAck(7, 1000, [state])))
    world.tick(2 * TIMING.resend_ns)
    told = [codec.decode(item.what)[1][0] for item in world.pool if item.kind == "message"]
    (again,) = [message for message in told if isinstance(message, msg.PartReady)]
    assert (PartKind.KV, key) in {(tag.kind, tag.key) for tag in map(Tag.unpack, again.tags)}


def test_a_state_of_another_length_than_the_plan_has_is_not_believed() -> None:
    world = world_of()
    world.receive(7, 1, states=(1,), aux=-1)
    world.flush()
    here = world.d().local.incarnation
    odd = [
        (PartKind.STATE, PartKey(0, 1, 0, 1)),
        (PartKind.STATE, PartKey(0, 2, 0, 3)),
        (PartKind.STATE, PartKey(0, 0, 0, 4)),
        (PartKind.STATE, PartKey(1, 1, 0, 2)),
        (PartKind.AUX, PartKey(0, 1, 0, 2)),
        (PartKind.KV, PartKey(0, 1, 0, 2)),
    ]
    for kind, key in odd:
        world.feed("decode-0", ev.Arrived(Tag(kind, here, 7, 1000, 0, key), 1))
    assert world.d().telemetry.metrics.total("kvctl_tags_dropped_total", "unplanned") == len(odd)
    assert np.all(not world.d().rooms[7].begun)
