"""Silent writers with ring regions: they must not block others, and their regions must not be reused."""

from __future__ import annotations

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.ring import RegionState
from tests.support.folded import folded
from tests.support.protocol.moments import connected
from tests.support.protocol.simulation import SECOND, UNIT, Instance, Item, World

SILENT = "prefill-0"


def world(ring: int = 4) -> World:
    """Two prefill instances of one rank each; a page is two units of the ring."""
    return connected(others=[Instance(ParallelConfig())], ring=ring, chunk_pages=1)


def pass_time(world: World, seconds: float) -> None:
    for _ in range(int(seconds * 10)):
        world.tick(SECOND // 10)
        world.flush()


def held_up(made: World, *, posted: bool) -> list[Item]:
    """The silent writer has the oldest region of the ring, posted or not, and then stops; what its engine will say."""
    later: list[Item] = []
    made.receive(7, 1)
    made.flush()
    made.send(7, 1)
    if posted:
        while not made.flying:
            made.happen(made.pool.pop(made.ready()[0]))
    else:
        engine = made.pool.pop()
        made.pool.append(engine._replace(what=engine.what[:2]))  # asks for staging, its forward is not done
        later.append(engine._replace(what=engine.what[2:]))
        made.flush()
    assert len(made.d().state.grant_table) == 1
    made.paused.add(SILENT)
    return later


def run(made: World, rooms: range) -> list[RoomState]:
    """Rooms of the other instance."""
    opened = [made.receive(room, 2, instance=1) for room in rooms]
    made.flush()
    for room in rooms:
        made.send(room, 2, instance=1)
    made.flush()
    pass_time(made, 2)
    return [room.state for room in opened]


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("silence_s", [4, 20])
def test_the_others_go_on_and_what_it_had_in_flight_lands_where_nobody_is(posted: bool, silence_s: int) -> None:
    """4 s: suspect, its room still alive. 20 s: lost, its room failed and its region quarantined."""
    made = world()
    later = held_up(made, posted=posted)
    pass_time(made, silence_s)
    assert run(made, range(20, 30)) == [RoomState.SUCCESS] * 10
    lost = silence_s > 15
    (held,) = made.d().state.grant_table.allocations()
    assert held.state is (RegionState.QUARANTINED if lost else RegionState.GRANTED)
    assert made.d().state.grant_table.quarantined_bytes == (2 * UNIT if lost else 0)
    made.paused.clear()
    made.pool += later
    pass_time(made, 8)
    room = next(room for room in made.rooms.values() if room.room == 7)
    assert room.state is (RoomState.FAILED if lost else RoomState.SUCCESS)
    assert room.released
    assert made.d().state.grant_table.ring.used_bytes == made.d().state.grant_table.quarantined_bytes == 0


def stuck_write(made: World) -> Item:
    """The first writer's engine has the write of the oldest region and does not end it, though the writer is well."""
    made.receive(7, 1)
    made.flush()
    made.send(7, 1)
    while not made.flying:
        made.happen(made.pool.pop(made.ready()[0]))
    (stuck,) = [item for item in made.pool if item.kind == "complete"]
    made.pool.remove(stuck)
    return stuck


def test_a_write_that_does_not_end_holds_up_nobody_either() -> None:
    """Its writer is heard well and says that it is too late to give the region back."""
    made = world()
    stuck = stuck_write(made)
    assert run(made, range(20, 26)) != [RoomState.SUCCESS] * 6, "somebody waits behind it"
    pass_time(made, 15)
    assert made.counts["TooLate"] >= 1
    assert [room.state for room in made.rooms.values() if room.room != 7] == [RoomState.SUCCESS] * 6
    made.pool.append(stuck)
    made.settle()
    assert {room.state for room in made.rooms.values()} == {RoomState.SUCCESS}
    made.check_empty()


def test_a_failed_room_whose_writer_never_drains_is_counted_and_said_on_both_ends() -> None:
    made = world()
    stuck = stuck_write(made)
    made.feed("decode-0", ev.AbortRoom(7, "enough"))
    pass_time(made, 100)
    assert made.d().quarantined_bytes == 0, "it may still come"
    pass_time(made, 30)
    assert made.d().state.grant_table.quarantined_bytes == 2 * UNIT
    assert made.d().quarantined_bytes > made.d().state.grant_table.quarantined_bytes, "its pages count too"
    said = {
        name: [event["text"] for event in folded(made.machines[name].telemetry).recorder.since(0, 999)["events"]]
        for name in ("decode-0", SILENT)
    }
    assert sum("is still held: not drained by prefill-0" in text for text in said["decode-0"]) == 1
    assert sum("still held: writes in flight: 1 to decode-0" in text for text in said[SILENT]) == 1
    made.pool.append(stuck)
    made.settle()
    made.check_empty()
