"""The oracle catches mistakes of the layout: machines and plan agree then, so nothing else in a simulation differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout import plan
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import ModelShape, StateShape
from kvctl_agent.protocol.prefill import admission
from kvctl_agent.protocol.tag import PartKind
from tests.support.protocol import invariants
from tests.support.protocol.invariants import Broken
from tests.support.protocol.simulation import World, mixed

SHAPE = ModelShape(3, 4, 16, 16, 2, states=(StateShape("conv", (0, 2), 3, 4, 16),))
PREFILL, DECODE = ParallelConfig(tp=4), ParallelConfig(pp=2, tp=2)

Slices = Callable[[TransferSlice], Iterator[TransferSlice]]


def run() -> World:
    """Runs a room from TP4 to TP2 with two pipeline stages; its prompt has a cached prefix."""
    world = World(PREFILL, DECODE, shape=SHAPE, choose=mixed, ring=64)
    world.connect()
    for reader in range(DECODE.size):
        world.receive(7, 6, reader=reader, prefix=1, states=(2,))
    world.send(7, 6, states=(2,))
    world.settle()
    return world


def one(share: TransferSlice) -> bool:
    """Whether a slice is the second half of the heads of one pair of ranks, which has one of its two layers."""
    return (share.reader, share.segment, share.dst_head) == (1, 0, 1)


def dropped(share: TransferSlice) -> Iterator[TransferSlice]:
    if not one(share):
        yield share


def doubled(share: TransferSlice) -> Iterator[TransferSlice]:
    yield replace(share, dst_head=0) if one(share) else share


def shorter(share: TransferSlice) -> Iterator[TransferSlice]:
    yield replace(share, layer_hi=share.layer_hi - 1) if one(share) else share


def outside(share: TransferSlice) -> Iterator[TransferSlice]:
    yield replace(share, src_head=share.src_head + 1) if one(share) else share


def swapped(share: TransferSlice) -> Iterator[TransferSlice]:
    yield replace(share, dst_head=1 - share.dst_head) if (share.reader, share.segment) == (1, 0) else share


def without_state(share: TransferSlice) -> Iterator[TransferSlice]:
    if not (share.segment == 1 and share.reader == 1 and share.dst_head):
        yield share


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        (dropped, r"\(0, 0, \d+, 1\) is planned as None instead of"),
        (doubled, r"\(0, 0, \d+, 0\) is planned twice"),
        (shorter, r"\(0, 1, \d+, 1\) is planned as None instead of"),
        (outside, r"writer \d is to send .* and holds LocalShard"),
        (swapped, r"is planned as \(1, 3\) instead of \(1, 2\)"),
        (without_state, r"\(1, 0, \d+, 1\) is planned as None instead of"),
    ],
)
def test_wrong_slices_are_caught(mutant: Slices, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = plan._segment_slices
    monkeypatch.setattr(plan, "_segment_slices", lambda *inputs: (y for x in slices(*inputs) for y in mutant(x)))
    for name in ("_plan", "_room_plan"):
        monkeypatch.setattr(plan, name, getattr(plan, name).__wrapped__)  # their caches have the right plans
    with pytest.raises(Broken, match=text):
        run()


def test_a_missing_chunk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = plan.writer_cells

    def fewer(*args: Any) -> Any:
        return cells(*args)[1:]

    for module in (invariants, admission):
        monkeypatch.setattr(module, "writer_cells", fewer)
    with pytest.raises(Broken, match=r"is planned as None instead of \(1, "):
        run()


def test_a_missing_aux_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    of_call = invariants.RoomPlan.of_call

    def without(*args: Any) -> invariants.RoomPlan:
        made = of_call(*args)
        made.finals = {part: planned for part, planned in made.finals.items() if part[0] is not PartKind.AUX}
        return made

    monkeypatch.setattr(invariants.RoomPlan, "of_call", without)
    with pytest.raises(Broken, match=r"aux rows \[\] are planned, not 0"):
        run()


def test_the_right_plan_passes() -> None:
    assert {room.state for room in run().rooms.values()} == {RoomState.SUCCESS}
