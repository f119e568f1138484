"""Aux rows that arrive in their tags: stored once, before the room succeeds, and sent again with a lost tag."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from msgspec.structs import replace

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag, aux_key, with_row
from tests.support.protocol.oracle import Write, row_of
from tests.support.protocol.simulation import World, direct, staged

ROW = struct.pack("<II", 7, 1000)


class WithRows(World):  # type: ignore[misc]
    """Writers send all aux rows in tags; the first `lose` tags with a row are lost."""

    def __init__(self, *args: Any, lose: int = 0, **options: Any) -> None:
        self.lose = lose
        self.told: list[bytes] = []
        super().__init__(*args, **options)

    def _begin(self, write: Write) -> None:
        order = write.order
        if order.kind is not PartKind.AUX or order.cancel.cancelled:
            super()._begin(write)
            return
        self._over(write, dropped=False)
        told = self.pool.pop()
        row = row_of(replace(order, aux_row=1))
        self.pool.append(told._replace(what=replace(told.what, row=row)))
        self._tell(write, with_row(order.tag, row))

    def _tell(self, write: Write, tag: bytes) -> None:
        if self.lose and Tag.unpack(tag).row is not None:
            self.lose -= 1
        else:
            self.told.append(tag)
            super()._tell(write, tag)


def world_of(**options: Any) -> WithRows:
    world = WithRows(ParallelConfig(tp=2), ParallelConfig(tp=2), **{"choose": direct, "ring": 64, **options})
    world.connect()
    return world


def arrived(world: World, kind: PartKind, row: bytes | None = None, serial: int = 0) -> None:
    """Feeds the decode rank a tag of the only part of its kind, of room 7."""
    key = aux_key(0) if kind is PartKind.AUX else PartKey(0, 0, 0, 2)
    world.feed("decode-0", ev.Arrived(Tag(kind, world.d().local.incarnation, 7, 1000, serial, key, row=row), 1))


def dropped(world: World, reason: str) -> float:
    return world.d().telemetry.metrics.total("kvctl_tags_dropped_total", reason)


ALONE, WITH_KV = PartKind.AUX, PartKind.KV


@pytest.mark.parametrize("choose", [direct, staged])
@pytest.mark.parametrize("lose", [0, 1, 2])
@pytest.mark.parametrize("together", [False, True])
def test_a_row_is_stored_once_before_its_room_succeeds_even_if_its_tag_is_lost(
    choose: Any, lose: int, together: bool
) -> None:
    world = world_of(choose=choose, lose=lose)
    for reader in (0, 1):
        world.receive(7, 4, reader=reader, aux=3)
    world.flush()
    world.send(7, 4, together=together)
    world.settle()
    assert {room.state for room in world.rooms.values()} == {RoomState.SUCCESS}
    assert [room.aux_written for room in world.rooms.values()] == [1, 1]
    assert (world.counts["PartReady"] > 0) == (lose > 0)
    world.check_empty()


def test_the_last_part_takes_the_row_along() -> None:
    world = world_of()
    world.receive(7, 4, aux=3)
    world.flush()
    world.send(7, 4, together=True)
    world.settle()
    tags = [Tag.unpack(tag) for tag in world.told]
    assert {tag.kind for tag in tags} == {PartKind.KV}
    assert [tag.row for tag in tags if tag.key.writer == 0][-1] == ROW
    assert sum(tag.row is not None for tag in tags) == 1


@pytest.mark.parametrize("kind", [ALONE, WITH_KV])
def test_a_second_tag_stores_nothing(kind: PartKind) -> None:
    world = world_of()
    room = world.receive(7, 4, aux=3)
    world.flush()
    for _ in range(2):
        arrived(world, kind, ROW)
    assert room.aux_written == 1
    assert dropped(world, "duplicate") == (1 if kind is ALONE else 2)


def test_a_row_is_taken_although_its_part_had_arrived_before() -> None:
    """The part's tag was sent again, without the row, and overtook the first one."""
    world = world_of()
    room = world.receive(7, 4, aux=3)
    world.flush()
    arrived(world, WITH_KV)
    assert room.aux_written == 0
    arrived(world, WITH_KV, ROW)
    assert room.aux_written == 1


@pytest.mark.parametrize("kind", [ALONE, WITH_KV])
def test_a_row_for_a_failed_room_is_not_stored(kind: PartKind) -> None:
    world = world_of()
    room = world.receive(7, 4, aux=3)
    world.flush()
    world.feed("decode-0", ev.AbortRoom(7, "enough"))
    arrived(world, kind, ROW)
    assert room.aux_written == 0


def test_a_row_with_a_part_into_a_region_that_is_not_its_own_is_not_stored() -> None:
    world = world_of(choose=staged)
    room = world.receive(7, 4, aux=3)
    world.flush()
    arrived(world, WITH_KV, ROW, serial=99)
    assert room.aux_written == 0
    assert dropped(world, "stale-grant") == 1


@pytest.mark.parametrize("kind", [ALONE, WITH_KV])
@pytest.mark.parametrize("row", [ROW[1:], ROW + b"x"])
def test_a_row_of_another_size_than_the_pool_s_is_malformed(row: bytes, kind: PartKind) -> None:
    world = world_of()
    room = world.receive(7, 4, aux=3)
    world.flush()
    arrived(world, kind, row)
    assert room.aux_written == 0
    assert dropped(world, "malformed") == 1
