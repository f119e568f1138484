"""Failures of KV transfer known from other systems, one test each.

A test is named after the failure, and its docstring is the symptom that an operator saw. Most run the shipped machines
in a simulated world with its oracle; failures that involve a thread or a socket use the real ones.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from tests.support.folded import folded
from tests.support.protocol.moments import connected, run_until
from tests.support.protocol.simulation import SECOND, TIMING, UNIT, World


def held_up() -> World:
    """Room 8 is computed and gated: room 7 holds the ring, and its engine is not done."""
    world = connected(ring=2, chunk_pages=1)
    for room in (7, 8):
        world.receive(room, 1, aux=-1)
    world.flush()
    for room in (7, 8):
        world.feed("prefill-0", ev.SendRoom(room))
        world.feed("prefill-0", ev.Prefetch(room))
        world.flush()
    world.source["prefill-0", 0] = (8, 0)
    world.feed("prefill-0", ev.SendPages(8, np.zeros(1, np.int32), True, 1))
    world.feed("prefill-0", ev.Finish(8, 1, 1))
    assert [transfer.room for transfer, _ in world.p().parked()] == [8]
    return world


# ---- the ring ------------------------------------------------------------------------------------------------------


def test_a_cycle_through_memory_held_by_rooms_that_wait_for_the_watermark() -> None:
    """Under load all rooms stopped at once: each held ring bytes that the next one waited for."""
    world = held_up()
    ended = world.now_ns + 3 * TIMING.revoke_ns
    while not world.rooms["decode-0", 8, 1001].state.finished and world.now_ns < ended:
        world.tick(SECOND)
        world.flush()
    assert world.rooms["decode-0", 8, 1001].state is RoomState.SUCCESS
    assert world.d().telemetry.metrics.total("kvctl_ring_revokes_total") == 1
    assert world.rooms["decode-0", 7, 1000].state is RoomState.WAITING_FOR_INPUT
    world.source["prefill-0", 1] = (7, 0)
    world.feed("prefill-0", ev.SendPages(7, np.ones(1, np.int32), True, 1))
    world.feed("prefill-0", ev.Finish(7, 1, 1))
    world.sent = {("prefill-0", 7): RoomState.SUCCESS, ("prefill-0", 8): RoomState.SUCCESS}
    world.settle()
    assert world.rooms["decode-0", 7, 1000].state is RoomState.SUCCESS


# ---- what has arrived ----------------------------------------------------------------------------------------------


def test_success_with_a_scatter_still_out_and_no_deadline_on_that_state() -> None:
    """Decodes read pages that were still being filled; and where the scatter died, the room stayed open for ever."""
    world = connected()
    room = world.receive(7, 2)
    world.send(7, 2)
    run_until(world, "scatter")
    assert room.state is RoomState.TRANSFERRING
    while world.now_ns < 2 * TIMING.waiting_ns and not room.state.finished:
        run_until(world, "scatter")
        world.tick(SECOND)
    assert room.failure["code"] == "KV_ROOM_STUCK_SCATTER"
    assert "writer 0 chunk 0 landed but is not in its pages" in room.failure["text"]
    assert not room.released, "the scatter may still run"
    world.settle()
    assert room.released


# ---- what nobody was told ------------------------------------------------------------------------------------------


def test_a_silent_fall_back_to_a_path_a_thousand_times_slower() -> None:
    """Throughput fell to a trickle after a change of chunk size, and nothing in any log said why."""
    world = connected(ring=3, chunk_pages=2)
    room = world.receive(7, 3)
    world.send(7, 3)
    world.settle()
    metrics = world.p().telemetry.metrics
    assert room.state is RoomState.SUCCESS
    assert metrics.total("kvctl_fallbacks_total", "ring-too-small") == 1
    assert metrics.total("kvctl_parts_total", "slice") == 1
    assert metrics.total("kvctl_parts_total", "staged") == 1
    events = folded(world.p().telemetry).recorder.since(None, 50)["events"]
    (text,) = [event["text"] for event in events if event["kind"] == "fallback"]
    assert f"needs {4 * UNIT} bytes, the ring of decode-0 has {3 * UNIT}: sent by slice" in text
    world.check_empty()


# ---- threads and sockets -------------------------------------------------------------------------------------------


# ---- all ranks, all rooms ------------------------------------------------------------------------------------------


def things(root: object) -> Counter[str]:
    """Entries of every container that a machine reaches, by where they are; not what its telemetry keeps."""
    counts: Counter[str] = Counter()
    seen: set[int] = set()

    def walk(value: object, place: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict):
            counts[place] += len(value)
            for entry in value.values():
                walk(entry, place + "[]")
        elif hasattr(value, "__len__") and not isinstance(value, str | bytes | np.ndarray):
            counts[place] += len(value)
            for entry in value if isinstance(value, list | tuple | set) else ():
                walk(entry, place + "[]")
        if type(value).__module__.startswith("kvctl_agent.protocol"):
            names = [
                *getattr(value, "__dict__", ()),
                *(s for c in type(value).__mro__ for s in getattr(c, "__slots__", ())),
            ]
            for name in names:
                if name not in ("telemetry", "record") and hasattr(value, name):
                    walk(getattr(value, name), f"{place}.{name}")

    walk(root, type(root).__name__)
    return counts


def test_per_room_sets_that_only_grow() -> None:
    """Ranks that were up for weeks used gigabytes and answered slowly; a restart helped each time."""

    def lives(world: World, numbers: range) -> list[Counter[str]]:
        """Rooms that succeed, fall back, are aborted by either side, or are refused; then their tombstones expire."""
        for number in numbers:
            kind = number % 5
            expects = 9 if kind == 3 else 4
            world.receive(number, expects, **({"first_page": 1 << 20} if kind == 4 else {"first_page": 8}))
            world.send(number, 4 if kind != 1 else expects)
            for _ in range(number % 7 * 5):
                if places := world.ready():
                    world.happen(world.pool.pop(places[0]))
            if kind in (1, 2):
                world.feed("decode-0" if kind == 1 else "prefill-1", ev.AbortRoom(number, "enough"))
            world.settle()
            world.rooms.clear()
            world.sent.clear()
            world.sent_released.clear()
            world.source.clear()
        for _ in range(4):
            world.tick(TIMING.bootstrap_ns // 2)
            world.flush()
        return [things(machine.state) for machine in world.machines.values()]

    world = connected(ParallelConfig(tp=2), ring=3, chunk_pages=1)
    after_few = lives(world, range(100, 110))
    after_many = lives(world, range(110, 210))
    assert after_many == after_few
    assert sum(map(Counter.total, after_few)) > 20, "it looked into the machines"
