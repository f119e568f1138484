"""Layers sent group by group: staging requests, order of parts, invalid groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import layer_range
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.tag import PartKind
from tests.support.protocol.moments import connected, run_until
from tests.support.protocol.simulation import World, direct

DEEP = ModelShape(4, 2, 32, 32, 2)
HALVES = ((0, 2), (2, 4))


def opened(
    pages: int = 4, *, prefill: ParallelConfig | None = None, decode: ParallelConfig | None = None, **options: Any
) -> World:
    """A room opened at every rank and announced by every prefill engine, which has computed nothing."""
    world = World(
        prefill or ParallelConfig(),
        decode or ParallelConfig(),
        **{"shape": DEEP, "choose": direct, "ring": 64, **options},
    )
    world.connect()
    for reader in range(world.decode.size):
        world.receive(7, pages, reader=reader, aux=-1)
    world.flush()
    for name in world.prefill_names:
        world.feed(name, ev.SendRoom(7))
    return world


def compute(
    world: World,
    first: int,
    end: int,
    layers: tuple[int, int] | None = None,
    *,
    last: bool = False,
    rank: int = 0,
    shift: int = 0,
) -> None:
    """The engine has pages [first, end) of room 7 in these layers; they are numbered by their positions."""
    name = world.prefill_names[rank]
    pages = np.arange(first, end, dtype=np.int32) + shift
    for position, page in enumerate(pages.tolist(), first):
        world.source[name, page] = (7, position)
    world.feed(name, ev.SendPages(7, pages, last, 1, layers))


def ordered(world: World) -> list[tuple[str, int, int, int]]:
    """(to whom, chunk, layers) of the writes that wait for a worker, taken off."""
    orders = [item.what.order for item in world.pool if item.kind == "begin"]
    world.flush()
    return [(order.peer, *order.key[1:]) for order in orders]


def failure(world: World, rank: int = 0) -> str:
    return str((world.sent_failures[world.prefill_names[rank], 7] or {}).get("text"))


def finish(world: World, rank: int = 0, states: Sequence[int] = ()) -> None:
    name = world.prefill_names[rank]
    world.feed(name, ev.Finish(7, 1, 1, world.compute_states(name, 7, states)))


def test_declared_groups_are_asked_for_in_one_message_before_anything_is_computed() -> None:
    world = opened(choose=lambda *given: "staged")
    world.feed("prefill-0", ev.Prefetch(7, HALVES))
    (request,) = [codec.decode(item.what)[1][0] for item in world.pool if item.kind == "message"]
    assert isinstance(request, msg.StagingRequest)
    assert [(part.chunk, part.lo, part.hi) for part in request.parts] == [(0, 0, 2), (0, 2, 4), (1, 0, 2), (1, 2, 4)]


def test_a_group_goes_as_soon_as_it_is_computed() -> None:
    world = opened()
    world.feed("prefill-0", ev.Prefetch(7, HALVES))
    compute(world, 0, 4, (0, 2), last=True)
    assert ordered(world) == [("decode-0", 0, 0, 2), ("decode-0", 1, 0, 2)]
    compute(world, 0, 4, (2, 4), last=True)
    assert ordered(world) == [("decode-0", 0, 2, 4), ("decode-0", 1, 2, 4)]
    finish(world)
    world.settle()
    assert world.rooms["decode-0", 7, 1000].state is RoomState.SUCCESS


def test_a_readers_pipeline_stage_cuts_a_group() -> None:
    world = opened(2, decode=ParallelConfig(pp=2, stages=(1, 3)))
    world.feed("prefill-0", ev.Prefetch(7, HALVES))
    compute(world, 0, 2, (0, 2), last=True)
    assert ordered(world) == [("decode-0", 0, 0, 1), ("decode-1", 0, 1, 2)]
    compute(world, 0, 2, (2, 4), last=True)
    assert ordered(world) == [("decode-1", 0, 2, 4)]


def test_a_group_is_cut_where_the_draft_begins() -> None:
    world = opened(2, shape=ModelShape(4, 2, 32, 32, 2, draft=ModelShape(2, 1, 16, 16, 2)))
    world.feed("prefill-0", ev.Prefetch(7, ((0, 3), (3, 6))))
    compute(world, 0, 2, (0, 3), last=True)
    compute(world, 0, 2, (3, 6), last=True)
    assert ordered(world) == [("decode-0", 0, 0, 3), ("decode-0", 0, 3, 4), ("decode-0", 0, 4, 6)]


@pytest.mark.parametrize(
    "groups", [((0, 2),), ((0, 2), (1, 4)), ((0, 4), (4, 5)), ((2, 4), (0, 2)), ((0, 0), (0, 4)), ((0, 1), (2, 4))]
)
def test_declared_groups_that_do_not_tile_the_layers_fail_the_room_and_are_named(
    groups: tuple[tuple[int, int], ...],
) -> None:
    world = opened()
    world.feed("prefill-0", ev.Prefetch(7, groups))
    named = ", ".join(layer_range(lo, hi) for lo, hi in groups)
    assert failure(world) == f"room 7: layer groups {named} do not tile layers 0-3"
    world.settle()
    assert world.rooms["decode-0", 7, 1000].failure["code"] == "KV_PLAN_MISMATCH"


def test_groups_are_of_the_layers_of_ones_own_stage() -> None:
    world = opened(prefill=ParallelConfig(pp=2))
    world.feed("prefill-1", ev.Prefetch(7, HALVES))
    assert failure(world, 1) == "room 7: layer groups 0-1, 2-3 do not tile layers 2-3"


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"first": 4, "end": 6}, "layers 0-3 do not stand at one page: 0-1 at page 4, 2-3 at page 0"),
        (
            {"first": 0, "end": 4, "layers": (2, 4), "shift": 1},
            "pages 0-4 are others than those given for other layers",
        ),
        ({"first": 0, "end": 6, "layers": (2, 4)}, "pages 0-6 are others than those given for other layers"),
        (
            {"first": 0, "end": 2, "layers": (2, 4), "last": True},
            "the last pages end at 2, but other layers were given 4",
        ),
        ({"first": 0, "end": 4, "layers": (2, 5)}, "layers 2-4 are not among this rank's 0-3"),
    ],
)
def test_groups_out_of_step_fail_the_room_in_words(second: dict[str, Any], text: str) -> None:
    world = opened()
    compute(world, 0, 4, (0, 2))
    compute(world, **second)
    assert failure(world) == f"room 7: {text}"
    world.settle()
    assert text in world.rooms["decode-0", 7, 1000].failure["text"]
    world.check_empty()


def test_groups_that_disagree_on_the_end_fail_the_room() -> None:
    world = opened(6)
    compute(world, 0, 4, (0, 2), last=True)
    assert "this side computed 4 pages, decode-0 expects 6" in failure(world)


@pytest.mark.parametrize("says_so", [(True, False), (False, True), (False, False)])
def test_one_group_or_finish_may_say_that_these_were_the_last_pages(says_so: tuple[bool, bool]) -> None:
    world = opened(3)
    compute(world, 0, 3, (0, 2), last=says_so[0])
    compute(world, 0, 3, (2, 4), last=says_so[1])
    finish(world)
    world.settle(ticks=1)
    assert world.rooms["decode-0", 7, 1000].state is RoomState.SUCCESS


def test_an_engine_that_stops_between_groups_is_told_so_at_the_deadline() -> None:
    world = opened()
    compute(world, 0, 4, (0, 2), last=True)
    world.settle(ticks=130)
    texts = {failure(world), world.rooms["decode-0", 7, 1000].failure["text"]}
    assert any(
        "layers 2-3 were given 0 of 4 pages" in text or "layers 2-3 of prefill-0 did not arrive" in text
        for text in texts
    )


def test_final_parts_are_queued_only_after_every_group_of_every_chunk() -> None:
    world = connected(shape=DEEP, choose=direct, chunk_pages=1)
    world.receive(7, 3)
    world.send(7, 3, groups=[1])
    run_until(world, "begin")
    kinds = [item.what.order.kind for item in world.pool]
    assert kinds == [PartKind.KV] * 12 + [PartKind.AUX]


def test_without_groups_a_room_costs_no_message_more() -> None:
    """With pipelining off the plain path runs: features cost nothing when unused."""
    counts = []
    for groups in ([], [4]):
        world = connected(shape=DEEP, ring=64)
        world.receive(7, 4)
        world.send(7, 4, groups=groups)
        world.settle()
        counts.append(world.counts)
    assert counts[0] == counts[1]


def test_a_room_is_computed_from_its_first_forward_on_however_often_staging_is_asked_for() -> None:
    """An engine may say so long before, and again before the forward of each chunk."""
    world = opened(4)
    begun = []
    for at_ns, first, end in ((5, 0, 0), (10, 0, 2), (20, 2, 4)):
        world.feed("prefill-0", ev.Prefetch(7, HALVES, at_ns))
        begun.append(world.p().rooms[7].record.forward_begun_at)
        for group in HALVES if end else ():
            compute(world, first, end, group)
    assert begun == [5, 10, 10]
