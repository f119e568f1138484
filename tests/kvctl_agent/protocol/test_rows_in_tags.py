"""Aux rows that arrive in their tags: stored once, before the room succeeds, and sent again with a lost tag."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag, with_row
from tests.support.protocol.invariants import Broken
from tests.support.protocol.oracle import Write
from tests.support.protocol.simulation import AUX_ROW_BYTES, Item, World, direct, staged

ROW = bytes(range(AUX_ROW_BYTES))


class WithRows(World):  # type: ignore[misc]
    """Writers send aux rows in their tags, of which the first `lose` are lost. The oracle counts the stored rows."""

    def __init__(self, *args: Any, lose: int = 0, **options: Any) -> None:
        self.lose = lose
        super().__init__(*args, **options)

    def _begin(self, write: Write) -> None:
        order = write.order
        if order.kind is not PartKind.AUX or order.cancel.cancelled:
            super()._begin(write)
            return
        self._over(write, dropped=False)
        told = self.pool.pop()
        self.pool.append(told._replace(what=replace(told.what, row=ROW)))
        if self.lose:
            self.lose -= 1
        else:
            self.pool.append(Item("tag", order.peer, write.writer, with_row(order.tag, ROW)))

    def _act(self, name: str, action: ev.Action) -> None:
        if isinstance(action, ev.StoreAux):
            mine = [room for room in self.rooms.values() if room.reader == name]
            (room,) = [room for room in mine if room.opening.aux_index == action.slot]
            if room.released or action.row != ROW:
                raise Broken(f"row {action.row.hex()} is stored for room {room.room}")
            (key,) = self.plan_of(room).finals
            if not room.cover(*key):
                raise Broken(f"the row of room {room.room} is stored twice")
        super()._act(name, action)


def world_of(**options: Any) -> WithRows:
    world = WithRows(ParallelConfig(tp=2), ParallelConfig(tp=2), **{"choose": direct, "ring": 64, **options})
    world.connect()
    return world


@pytest.mark.parametrize("choose", [direct, staged])
@pytest.mark.parametrize("lose", [0, 1, 2])
def test_a_row_is_stored_once_before_its_room_succeeds_even_if_its_tag_is_lost(choose: Any, lose: int) -> None:
    world = world_of(choose=choose, lose=lose)
    for reader in (0, 1):
        world.receive(7, 4, reader=reader, aux=3)
    world.flush()
    world.send(7, 4)
    world.settle()
    assert {room.state for room in world.rooms.values()} == {RoomState.SUCCESS}
    assert [room.aux_written for room in world.rooms.values()] == [1, 1]
    assert (world.counts["PartReady"] > 0) == (lose > 0)
    world.check_empty()


def test_a_second_tag_stores_nothing() -> None:
    world = world_of()
    room = world.receive(7, 4, aux=3)
    world.flush()
    again = Tag(PartKind.AUX, world.d().local.incarnation, 7, 1000, 0, PartKey(0, 0, 0, 0), row=ROW)
    for _ in range(2):
        world.feed("decode-0", ev.Arrived(again, 1))
    assert room.aux_written == 1
    assert world.d().telemetry.metrics.total("kvctl_tags_dropped_total", "duplicate") == 1


def test_a_row_for_a_failed_room_is_not_stored() -> None:
    world = world_of()
    room = world.receive(7, 4, aux=3)
    world.flush()
    world.feed("decode-0", ev.AbortRoom(7, "enough"))
    late = Tag(PartKind.AUX, world.d().local.incarnation, 7, 1000, 0, PartKey(0, 0, 0, 0), row=ROW)
    world.feed("decode-0", ev.Arrived(late, 1))
    assert room.aux_written == 0


@pytest.mark.parametrize("row", [ROW[1:], ROW + b"x"])
def test_a_row_of_another_size_than_the_pool_s_is_malformed(row: bytes) -> None:
    world = world_of()
    room = world.receive(7, 4, aux=3)
    world.flush()
    odd = Tag(PartKind.AUX, world.d().local.incarnation, 7, 1000, 0, PartKey(0, 0, 0, 0), row=row)
    world.feed("decode-0", ev.Arrived(odd, 1))
    assert room.aux_written == 0
    assert world.d().telemetry.metrics.total("kvctl_tags_dropped_total", "malformed") == 1
