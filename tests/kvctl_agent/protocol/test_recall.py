"""Recall on both sides: an engine takes the pages of a room back and goes on later, and no byte is wrong or twice."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.prefill.send_room import PartState
from tests.support.protocol.moments import messages_to, said
from tests.support.protocol.simulation import PAGE_SIZE, SECOND, TIMING, Item, World, direct, mixed, registry, staged

P0, D = "prefill-0", "decode-0"


def small(**options: object) -> World:
    """One writer and one reader with chunks of one page."""
    found = World(ParallelConfig(tp=1), ParallelConfig(), **{"chunk_pages": 1, **options})  # type: ignore[arg-type]
    found.connect()
    return found


def begin(world: World, kind: str = "begin") -> list[Item]:
    return [item for item in world.pool if item.kind == kind]


def happen(world: World, *kinds: str) -> None:
    """Executes the items of some kinds until there are none."""
    while items := [item for item in world.pool if item.kind in kinds]:
        world.pool.remove(items[0])
        world.happen(items[0])


def go_on(world: World, calls: tuple[ev.Event, ...], name: str = P0) -> None:
    world.pool.append(Item("engine", name, name, calls))


def succeeded(world: World) -> bool:
    return {room.state for room in world.rooms.values()} == {RoomState.SUCCESS} == set(world.sent.values())


@pytest.mark.parametrize("paths", [direct, staged, mixed])
@pytest.mark.parametrize("steps", range(0, 60, 3))
def test_a_recall_at_any_step_and_the_room_succeeds_from_other_pages(paths: object, steps: int) -> None:
    world = small(choose=paths, ring=2)
    world.receive(7, 4)
    world.send(7, 4, split=[2])
    dice = random.Random(steps)
    world.stir(dice, steps, delay=0)
    while not world.sent[P0, 7].finished and not (7 in world.p().rooms and world.p().rooms[7].claimed):
        world.happen(world.pool.pop(0))
    if not world.sent[P0, 7].finished:
        calls = world.recall(7, split=[1])
        world.flush()
        released = (P0, 7) in world.sent_released
        assert released or world.recalls[P0, 7] == 1
        go_on(world, calls)
    world.settle()
    assert succeeded(world)
    world.check_empty()


def test_parts_queued_are_dropped_and_parts_in_transfer_finish() -> None:
    world = small(choose=direct)
    world.receive(7, 2, aux=-1)
    world.send(7, 2)
    happen(world, "message", "engine")
    assert len(begin(world)) == 2
    first = begin(world)[0]
    world.pool.remove(first)
    world.happen(first)  # from here on the write is in flight
    calls = world.recall(7)
    assert (P0, 7) not in world.recalls
    happen(world, "begin", "event")
    assert (P0, 7) not in world.recalls  # the first one is still in flight
    happen(world, "complete", "event")
    assert world.recalls[P0, 7] == 1
    states = [part.state for part in world.p().rooms[7].transfers[D].parts.values()]
    assert states == [PartState.SENT, PartState.PLANNED]
    go_on(world, calls)
    world.settle()
    assert succeeded(world)
    assert world.paths["slice"] == 3  # one of the two was ordered twice


def test_a_recall_of_a_room_that_is_sent_needs_no_pages_again() -> None:
    world = small(choose=direct)
    world.receive(7, 2)
    world.send(7, 2)
    happen(world, "message", "engine", "begin")
    world.recall(7)  # while both parts and the aux row are in flight
    happen(world, "complete", "begin", "event", "complete", "event")
    assert world.p().rooms[7].released
    world.settle()
    assert succeeded(world)
    world.feed(P0, ev.Recall(7, 9))  # of a room that has ended
    assert world.recalls.get((P0, 7)) in (None, 1)


# ---- decode -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paths", [direct, staged])
@pytest.mark.parametrize("steps", range(0, 60, 3))
def test_a_decode_rank_recalls_at_any_step_and_opens_the_room_again(paths: object, steps: int) -> None:
    world = small(choose=paths, ring=2)
    first = world.receive(7, 4)
    world.send(7, 4, split=[2])
    world.stir(random.Random(steps), steps, delay=0)
    world.feed(D, ev.Recall(7))
    world.settle(until=lambda: first.released)
    if first.state is RoomState.SUCCESS:
        return
    assert (first.state, first.failure["code"]) == (RoomState.FAILED, "RECALLED")
    second = world.receive(7, 4)
    world.settle()
    assert second.state is world.sent[P0, 7]
    if second.state is RoomState.FAILED:
        assert second.failure["code"] == "RECALL_LATE"
        assert "must be computed again" in second.failure["text"]
    world.check_empty()


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_room_that_failed_before_the_recall_arrived_is_refused_when_it_is_opened_again(forgotten: bool) -> None:
    world = small(choose=direct)
    world.receive(7, 4)
    world.feed(P0, ev.SendRoom(7))
    world.flush()
    world.feed(D, ev.Recall(7, 0))
    (recall,) = messages_to(world, P0, msg.RoomAbort)
    world.pool.remove(recall)
    world.feed(P0, ev.AbortRoom(7, "the client went away"))
    if forgotten:
        world.flush()
    assert (7 in world.p().rooms) is not forgotten
    for _ in range(2):  # it is resent, too
        world.happen(recall)
    world.flush()
    again = world.receive(7, 4, nonce=2000)
    world.flush()
    assert again.state is RoomState.FAILED
    assert (again.failure["rank"], again.failure["code"]) == (P0, "ABORTED")
    world.check_empty()


def test_parts_that_a_recall_by_decode_has_dropped_are_not_planned_again() -> None:
    """Their grants end with the transfer, which RoomDrained says once for all."""
    world = small(ring=8)
    world.receive(7, 2, aux=-1)
    world.send(7, 2)
    while len(begin(world)) < 2:
        world.happen(world.pool.pop(next(place for place in world.ready() if world.pool[place].kind != "begin")))
    first = begin(world)[0]
    world.pool.remove(first)
    world.happen(first)
    transfer = world.p().rooms[7].transfers[D]
    world.feed(D, ev.Recall(7, 1))
    happen(world, "message")
    happen(world, "begin", "event")
    assert [part.state for part in transfer.parts.values()] == [PartState.QUEUED] * 2
    assert all(part.grant is not None for part in transfer.parts.values())
    assert world.p().state.transfers
    happen(world, "complete", "event")
    assert [type(message) for message in said(world, D)] == [msg.RoomDrained]


def test_a_room_that_is_not_opened_again_gives_its_pages_up() -> None:
    world = small(choose=direct)
    first = world.receive(7, 2)
    world.send(7, 2)
    happen(world, "message", "engine")
    world.feed(D, ev.Recall(7))
    world.settle(until=lambda: first.released)
    world.tick(121 * SECOND)
    assert world.sent_failures[P0, 7]["code"] == "KV_ROOM_STUCK_BOOTSTRAP"
    assert (P0, 7) in world.sent_released
    world.settle()


# ---- deadlines ----------------------------------------------------------------------------------------------------


def test_a_room_that_is_never_claimed_fails_on_both_sides_with_a_deadline_of_its_own() -> None:
    world = small(timing=msgspec.structs.replace(TIMING, unclaimed_ns=30 * SECOND))
    room = world.receive(7, 2)
    world.flush()
    for _ in range(3):
        assert room.state is RoomState.WAITING_FOR_INPUT
        world.tick(10 * SECOND)
        world.flush()
    world.tick(SECOND)
    world.flush()
    assert (room.failure["rank"], room.failure["code"]) == (P0, "KV_ROOM_UNCLAIMED")
    assert room.failure["text"].startswith("decode-0 opened room 7 31.0 s ago")
    world.settle()


def test_a_lease_is_renewed_until_the_room_is_opened_and_lapses_otherwise() -> None:
    world = small(timing=msgspec.structs.replace(TIMING, hold_ns=30 * SECOND))
    for room in (7, 8):
        world.send(room, 2)
    world.flush()
    for _ in range(4):
        world.tick(20 * SECOND)
        world.flush()
        world.feed(D, ev.RenewRooms(registry(0), (7, 9)))
        world.flush()
    assert world.sent[P0, 7] is RoomState.BOOTSTRAPPING
    assert world.sent_failures[P0, 8]["code"] == "KV_HOLD_EXPIRED"
    assert (P0, 8) in world.sent_released
    opened = world.receive(7, 2)
    world.settle()
    assert opened.state is world.sent[P0, 7] is RoomState.SUCCESS
    late = world.receive(8, 2)
    world.settle()
    assert late.failure["code"] == "KV_HOLD_EXPIRED"


def test_a_room_may_wait_to_be_opened_from_the_end_of_its_forward_on() -> None:
    world = small(timing=msgspec.structs.replace(TIMING, hold_ns=30 * SECOND))
    world.send(7, 2, split=[1])
    happen(world, "message")
    while not world.p().rooms.get(7) or not world.p().rooms[7].computed.given:
        world.happen(world.pool.pop(0))
    world.tick(50 * SECOND)
    world.flush()  # the forward ends
    assert world.p().rooms[7].computed.complete
    world.tick(29 * SECOND)
    assert not world.sent[P0, 7].finished
    world.tick(2 * SECOND)
    assert world.sent_failures[P0, 7]["code"] == "KV_HOLD_EXPIRED"


def test_without_a_lease_of_its_own_a_computed_room_waits_as_long_as_any() -> None:
    world = small()
    world.send(7, 2)
    world.flush()
    world.tick(119 * SECOND)
    assert not world.sent[P0, 7].finished
    world.tick(2 * SECOND)
    assert world.sent_failures[P0, 7]["code"] == "KV_ROOM_STUCK_BOOTSTRAP"


def test_renewal_of_an_unknown_instance_looks_it_up() -> None:
    world = small(introduced=False)
    world.feed(D, ev.RenewRooms(registry(0), (7,)))
    world.flush()
    assert world.d().is_ready(P0)


@pytest.mark.parametrize("recalls", [1, 2])
def test_a_failure_during_a_recall_abandons_the_parts_in_transfer(recalls: int) -> None:
    """They would be finished otherwise, which a stopped peer may delay for ever."""
    world = small(choose=direct)
    world.receive(7, 2)
    world.send(7, 2)
    happen(world, "message", "engine")
    tokens = {item.what.order.cancel for item in begin(world)}
    for serial in range(1, recalls + 1):
        world.recall(7, serial=serial)
    assert [(token.recalled, token.cancelled) for token in tokens] == [(True, False)]
    world.feed(P0, ev.AbortRoom(7, "enough"))
    assert [token.cancelled for token in tokens] == [True]
    world.settle()
    world.check_empty()


@pytest.mark.parametrize(("prefix", "state"), [(2, RoomState.SUCCESS), (3, RoomState.SUCCESS), (1, RoomState.FAILED)])
def test_a_room_is_not_opened_again_with_a_shorter_prefix_than_the_engine_was_told(
    prefix: int, state: RoomState
) -> None:
    """The engine may have passed any pages for the prefix that decode had cached."""
    world = small(choose=direct)
    first = world.receive(7, 4, prefix=2)
    world.send(7, 4)
    happen(world, "message", "engine")
    world.feed(D, ev.Recall(7))
    world.settle(until=lambda: first.released)
    assert not world.sent[P0, 7].finished
    second = world.receive(7, 4, prefix=prefix)
    world.settle()
    assert second.state is world.sent[P0, 7] is state
    if state is RoomState.FAILED:
        assert second.failure["code"] == "RECALL_LATE"
        assert "has 1 tokens cached now, 2 before: its prompt must be computed again" in second.failure["text"]
    world.check_empty()


def test_a_write_that_fails_after_decode_has_recalled_the_room_does_not_fail_it() -> None:
    world = small(choose=direct)
    first = world.receive(7, 2)
    world.send(7, 2)
    happen(world, "message", "engine")
    (transfer,) = world.p().rooms[7].transfers.values()
    world.feed(D, ev.Recall(7))
    happen(world, "message")
    assert transfer.recalled is not None
    failed = begin(world)[0]
    world.pool.remove(failed)
    order = failed.what.order
    world.feed(P0, ev.PartFailed(D, 7, order.nonce, order.kind, order.key, "KV_TRANSPORT", "no route", False))
    world.settle(until=lambda: first.released)
    assert not world.sent[P0, 7].finished
    second = world.receive(7, 2)
    world.settle()
    assert second.state is world.sent[P0, 7] is RoomState.SUCCESS
    world.check_empty()


def recall_between_send_and_its_event(world: World, prefix: int) -> None:
    """Decode opens room 7 with a prefix in pages; send() tells the prefill engine, and decode takes the room back."""
    world.receive(7, 4, prefix=prefix)
    happen(world, "message", "event")
    world.send(7, 4)
    call = next(item for item in world.pool if item.kind == "engine")
    world.pool.remove(call)
    world.happen(call)
    assert world.p().opened_prefix(7) == prefix * PAGE_SIZE
    world.feed(D, ev.Recall(7))
    happen(world, "message", "event")
    assert world.p().opened_prefix(7) is None


@pytest.mark.parametrize("again", [2, 3, 4])
def test_a_room_recalled_after_send_has_told_that_it_is_opened_waits_to_be_opened_again(again: int) -> None:
    world = small(choose=direct)
    recall_between_send_and_its_event(world, 2)
    happen(world, "engine")
    assert world.sent[P0, 7] is RoomState.WAITING_FOR_INPUT
    assert world.prefixes[P0, 7] == 2 * PAGE_SIZE
    world.receive(7, 4, prefix=again)
    world.settle()
    assert world.sent[P0, 7] is RoomState.SUCCESS
    assert world.prefixes[P0, 7] == 2 * PAGE_SIZE  # the engine passed pages from there on
    world.check_empty()


@pytest.mark.parametrize("machine_knows", [False, True])
def test_a_room_opened_again_with_a_shorter_prefix_than_send_has_told_fails(machine_knows: bool) -> None:
    world = small(choose=direct)
    recall_between_send_and_its_event(world, 2)
    if machine_knows:
        happen(world, "engine")
    world.receive(7, 4, prefix=1)
    happen(world, "message", "event")
    world.settle()
    assert world.sent[P0, 7] is RoomState.FAILED
    assert {room.failure["code"] for room in world.rooms.values() if room.failure} == {"RECALLED", "RECALL_LATE"}
    world.check_empty()
