"""Every history of small worlds: no reachable state has two live owners of a byte; from each, all rooms can finish.

Loss, copies, overtaking, aborts and restarts are bounded per history; the order of everything else is free.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from explorer import Budget, SmallWorld, explore
from simulation import SHAPE, Broken

from kvctl_agent.layout.shape import StateShape
from kvctl_agent.layout.side import Side
from kvctl_agent.protocol import gate as gate_module
from kvctl_agent.protocol import ring as ring_module


def small_world(
    rooms: int,
    writers: int,
    *,
    ring: int,
    pages: int = 1,
    aux: int = -1,
    granted: bool = False,
    computed: tuple[tuple[str, int], ...] = (),
    groups: tuple[int, ...] = (),
    states: tuple[int, ...] = (),
    cp: int = 1,
) -> SmallWorld:
    """Rooms 7, 8, … opened at all writers and asked for; the forwards are not done yet.

    Args:
        ring: units; a part of one page is one unit with two writers and two with one.
        granted: the grants have arrived too.
        computed: (agent, room) whose forward is done, in this order: their parts are with the workers, or parked.
        groups: layers in a group; a part of one page and one layer is one unit with one writer.
        states: items of each state component.
        cp: context parallel ranks, which share each chunk.
    """
    shape = replace(SHAPE, states=tuple(StateShape(f"s{n}", (0, 1), 1, 1, 64) for n in range(len(states))))
    prefill = Side(tp=writers, cp=cp)
    world = SmallWorld(prefill=prefill, decode=Side(), shape=shape, cp_mode="all-chunk", ring=ring, chunk_pages=cp)
    world.connect()
    numbers = range(7, 7 + rooms)
    for room in numbers:
        world.receive(room, pages, aux=aux, states=states)
    world.flush()
    for room in numbers:
        world.send(room, pages, groups=groups, states=states)
    engines = [item._replace(what=item.what[2:]) for item in world.pool]
    asking = [(item.to, call) for item in world.pool for call in item.what[:2]]
    world.pool.clear()
    for name, call in asking:
        world.feed(name, call)
    if granted:
        world.flush()
    for name, room in computed:
        engine = next(item for item in engines if item.to == name and item.what[0].room == room)
        engines.remove(engine)
        for call in engine.what:
            world.feed(name, call)
    world.pool += engines
    return world


SAME_ORDER = (("prefill-0", 7), ("prefill-0", 8), ("prefill-1", 7), ("prefill-1", 8))
OTHER_ORDER = (("prefill-0", 7), ("prefill-0", 8), ("prefill-1", 8), ("prefill-1", 7))


@pytest.mark.parametrize(
    ("world", "budget"),
    [
        pytest.param(
            {"rooms": 1, "writers": 1, "ring": 2}, Budget(2, losses=2, copies=1, overtakings=1), id="one room"
        ),
        pytest.param({"rooms": 1, "writers": 1, "ring": 2, "aux": 3}, Budget(2, losses=1, copies=1), id="aux"),
        pytest.param(
            {"rooms": 1, "writers": 1, "ring": 2, "pages": 2},
            Budget(2, losses=1, copies=1, overtakings=1),
            id="two parts of one writer wait for each other",
        ),
        pytest.param({"rooms": 1, "writers": 2, "ring": 2}, Budget(1), id="two writers"),
        pytest.param(
            {"rooms": 1, "writers": 1, "ring": 1, "groups": (1,)},
            Budget(2, losses=1, overtakings=1),
            id="two layer groups wait for each other",
        ),
        pytest.param(
            {"rooms": 2, "writers": 1, "ring": 1, "groups": (1,), "granted": True, "computed": (("prefill-0", 8),)},
            Budget(1),
            id="layer groups of two rooms",
        ),
        pytest.param({"rooms": 1, "writers": 1, "ring": 2, "states": (1,)}, Budget(2, losses=1, copies=1), id="state"),
        pytest.param({"rooms": 1, "writers": 1, "ring": 2, "cp": 2, "pages": 2}, Budget(1), id="two cp ranks"),
        pytest.param({"rooms": 2, "writers": 1, "ring": 2}, Budget(2, losses=1), id="two rooms gate each other"),
        pytest.param({"rooms": 2, "writers": 1, "ring": 3}, Budget(2, overtakings=2), id="a ring with a rest"),
        pytest.param(
            {"rooms": 2, "writers": 2, "ring": 1, "granted": True, "computed": SAME_ORDER},
            Budget(1),
            id="two rooms of two writers",
        ),
        pytest.param(
            {"rooms": 2, "writers": 2, "ring": 1, "granted": True, "computed": OTHER_ORDER},
            Budget(1),
            id="two writers with different queue orders",
        ),
        pytest.param(
            {"rooms": 2, "writers": 1, "ring": 2, "granted": True},
            Budget(3, losses=1, aborts=(("decode-0", 7),)),
            id="decode aborts",
        ),
        pytest.param(
            {"rooms": 1, "writers": 2, "ring": 1, "granted": True},
            Budget(1, aborts=(("prefill-0", 7),)),
            id="prefill aborts",
        ),
        pytest.param(
            {"rooms": 1, "writers": 1, "ring": 2},
            Budget(4, restarts=("prefill-0",)),
            id="prefill restarts",
        ),
        pytest.param(
            {"rooms": 1, "writers": 1, "ring": 2},
            Budget(4, restarts=("decode-0",)),
            id="decode restarts",
        ),
    ],
)
def test_every_history_is_safe_and_can_end(world: dict[str, Any], budget: Budget) -> None:
    explored = explore(small_world(**world), budget, limit=20_000)
    assert explored.ended > 0
    assert explored.states > 25


def test_the_explorer_finds_a_gate_that_is_always_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle can complain: without the watermark two writers meet in the ring."""
    monkeypatch.setattr(gate_module, "may_write", lambda round_, end, watermark: True)
    with pytest.raises(Broken, match=r"two writes in flight to the same ring bytes|where writer"):
        explore(small_world(2, 1, ring=2), Budget(1), limit=20_000)


def test_the_explorer_finds_a_room_that_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module.Ring, "free", lambda ring, serial: False)
    with pytest.raises(Broken, match=r"not over after|cannot end|; after: "):
        explore(small_world(2, 1, ring=2), Budget(1), limit=20_000)
