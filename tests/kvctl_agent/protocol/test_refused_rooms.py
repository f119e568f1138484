"""Rooms for which a decode engine has no pages: it ends them on the prefill ranks, whatever has been opened by then."""

from __future__ import annotations

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.decode.rooms import RecvRooms
from tests.support.protocol.moments import connected, pass_time
from tests.support.protocol.simulation import SECOND, Instance, World, registry

WHY = "the client went away"


def refuse(world: World, reader: int = 0, instance: int = 0) -> None:
    world.receive(7, 0, reader=reader, aux=-1, instance=instance, refusal=WHY)


def check(world: World, instance: int = 0) -> None:
    """Every rank has the reason of the refusal as its first cause, and nothing is left."""
    failures = [room.failure for room in world.rooms.values() if room.room == 7]
    failures += [world.sent_failures[name, 7] for name in world.names_of(instance)]
    assert {(failure["code"], failure["text"]) for failure in failures} == {("ABORTED", WHY)}
    assert all(room.released for room in world.rooms.values())
    world.check_empty()


@pytest.fixture
def world() -> World:
    return connected(ParallelConfig(tp=2), ParallelConfig(tp=2))


@pytest.mark.parametrize("claimed", ["before", "after", "long after"])
def test_it_ends_on_every_prefill_rank_at_once(world: World, claimed: str) -> None:
    if claimed == "before":
        world.send(7, 3)
        world.flush()
    refuse(world)
    world.flush()
    if claimed == "long after":
        world.tick(SECOND)
        world.flush()
    if claimed != "before":
        world.send(7, 3)
        world.flush()
    assert {world.sent[name, 7] for name in world.prefill_names} == {RoomState.FAILED}
    check(world)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("claimed", [False, True])
def test_a_decode_rank_that_has_pages_fails_with_it(world: World, first: int, claimed: bool) -> None:
    for name in world.prefill_names if claimed else ():
        world.feed(name, ev.SendRoom(7))
    for reader in (first, 1 - first):
        if reader:
            room = world.receive(7, 3, reader=1)
        else:
            refuse(world)
        world.flush()
    assert room.state is RoomState.FAILED
    if not claimed:
        world.send(7, 3)
        world.flush()
    check(world)


def test_ranks_that_all_refuse_end_it_once(world: World) -> None:
    world.send(7, 3)
    for reader in (0, 1):
        refuse(world, reader)
    world.flush()
    check(world)


def test_an_instance_that_is_not_connected_yet_is_told_when_it_is() -> None:
    world = World(ParallelConfig(tp=2), ParallelConfig(), others=[Instance(ParallelConfig(tp=2), introduced=False)])
    refuse(world, instance=1)
    world.send(7, 3, instance=1)
    assert {world.sent[name, 7] for name in world.names_of(1)} == {RoomState.BOOTSTRAPPING}
    world.flush()
    assert {world.sent[name, 7] for name in world.names_of(1)} == {RoomState.FAILED}
    check(world, 1)


class TestAbortedBeforeItIsOpened:
    """The decode rank is not connected to all ranks that compute the room: pages are free, and prefill learns of it."""

    @pytest.fixture
    def world(self) -> World:
        return World(ParallelConfig(), ParallelConfig(), others=[Instance(ParallelConfig(tp=2), introduced=False)])

    def abort(self, world: World) -> None:
        world.feed("decode-0", ev.AbortRoom(7, WHY))
        room = next(room for room in world.rooms.values() if room.room == 7)
        assert (room.state, room.released) == (RoomState.FAILED, True)
        assert 7 not in world.d().rooms

    @pytest.mark.parametrize("claimed", ["before", "after"])
    def test_its_prefill_ranks_fail_once_they_are_connected(self, world: World, claimed: str) -> None:
        if claimed == "before":
            world.send(7, 3, instance=1)
        world.receive(7, 3, instance=1)
        self.abort(world)
        world.flush()
        if claimed == "after":
            world.send(7, 3, instance=1)
            world.flush()
        assert {world.sent[name, 7] for name in world.names_of(1)} == {RoomState.FAILED}
        check(world, 1)

    def test_they_wait_until_all_of_them_are_connected(self, world: World) -> None:
        world.paused.add("p1-prefill-1")
        world.send(7, 3, instance=1)
        world.receive(7, 3, instance=1)
        world.flush()
        self.abort(world)
        world.tick(SECOND)
        world.flush()
        assert {world.sent[name, 7] for name in world.names_of(1)} == {RoomState.BOOTSTRAPPING}
        world.paused.clear()
        world.flush()
        world.tick(SECOND)
        world.flush()
        assert {world.sent[name, 7] for name in world.names_of(1)} == {RoomState.FAILED}
        check(world, 1)

    def test_it_is_forgotten_if_they_do_not_connect_in_time(self, world: World) -> None:
        world.paused |= set(world.names_of(1))
        world.receive(7, 3, instance=1)
        world.flush()
        self.abort(world)
        pass_time(world, 120)
        assert world.d().state.unopened.keys() == {7}
        world.tick(SECOND)
        assert not world.d().state.unopened
        assert not world.d().rooms

    def test_its_number_may_be_used_again_meanwhile(self, world: World) -> None:
        world.receive(7, 3, instance=1)
        self.abort(world)
        room = world.receive(7, 3, instance=1, nonce=2000)
        world.send(7, 3, instance=1)
        world.settle()
        assert room.state is RoomState.SUCCESS
        assert {world.sent[name, 7] for name in world.names_of(1)} == {RoomState.SUCCESS}
        world.check_empty()

    @pytest.mark.parametrize("instance", [0, 1])
    def test_or_while_they_are_told(self, world: World, instance: int) -> None:
        world.receive(7, 3, instance=1)
        self.abort(world)
        while not any(room.transfers for room in world.d().rooms.values()):
            world.happen(world.pool.pop(0))
        room = world.receive(7, 3, instance=instance, nonce=2000)
        world.flush()
        world.send(7, 3, instance=instance)
        world.settle()
        assert room.state is RoomState.SUCCESS
        assert {world.sent[name, 7] for name in world.names_of(instance)} == {RoomState.SUCCESS}

    def test_a_room_that_does_not_fit_the_plan_fails_on_them_with_that_cause(self, world: World) -> None:
        world.receive(7, 3, extra=-1)
        world.send(7, 3)
        world.settle()
        failure = world.sent_failures["prefill-0", 7]
        assert (failure["rank"], failure["code"]) == ("decode-0", "KV_PLAN_MISMATCH")
        world.check_empty()

    def test_nothing_is_kept_for_an_instance_that_is_disconnected(self, world: World) -> None:
        for room in (7, 8):
            world.receive(room, 3, instance=1)
        self.abort(world)
        world.feed("decode-0", ev.DisconnectInstance(registry(1)))
        assert not world.d().state.unopened
        assert not world.d().rooms

    def test_the_oldest_are_forgotten_first(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvctl_agent.protocol.decode.rooms.MAX_UNOPENED", 20)
        for room in range(30):
            world.receive(room, 0, aux=-1, instance=1, refusal=WHY)
        assert list(world.d().state.unopened) == list(range(10, 30))

    def test_a_tick_costs_nothing_for_each(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """They would hold up the control loop, ten times a second, by 20 ms."""
        for room in range(10):
            world.receive(room, 0, aux=-1, instance=1, refusal=WHY)
        monkeypatch.setattr(RecvRooms, "ranks_of", lambda rooms, room: pytest.fail(f"room {room.room} was tried"))
        world.d().handle(ev.Tick(), world.now_ns)


@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_room_that_its_engine_declines_fails_on_decode_and_its_number_serves_again(opened: str) -> None:
    """The engine has got the request elsewhere, and never calls `send` here."""
    world = connected()
    if opened == "after":
        world.feed("prefill-0", ev.DeclineRoom(7, WHY))
    room = world.receive(7, 3)
    world.flush()
    if opened == "before":
        world.feed("prefill-0", ev.DeclineRoom(7, WHY))
        world.flush()
    assert room.state is RoomState.FAILED
    assert (room.failure["code"], room.failure["text"]) == ("DECLINED", WHY)
    world.settle()
    world.sent.clear()  # the engine had no handle of it
    world.sent_released.clear()
    world.send(7, 3)
    again = world.receive(7, 3)
    world.settle()
    assert again.state is RoomState.SUCCESS
    world.check_empty()


@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_room_that_one_rank_declines_fails_on_every_decode_rank(world: World, opened: str) -> None:
    if opened == "after":
        world.feed("prefill-0", ev.DeclineRoom(7, WHY))
    rooms = [world.receive(7, 3, reader=reader) for reader in (0, 1)]
    world.flush()
    world.feed("prefill-0", ev.DeclineRoom(7, WHY))
    world.tick(SECOND)
    world.flush()
    assert {(room.failure["code"], room.failure["text"]) for room in rooms} == {("DECLINED", WHY)}
    world.settle()
    world.sent.clear()  # the engine had no handle of it at any rank
    world.sent_released.clear()
    world.send(7, 3)
    rooms = [world.receive(7, 3, reader=reader) for reader in (0, 1)]
    world.settle()
    assert {room.state for room in rooms} == {RoomState.SUCCESS}
    world.check_empty()


def test_a_room_that_the_engine_has_begun_here_is_not_declined(world: World) -> None:
    world.send(7, 3)
    world.feed("prefill-0", ev.DeclineRoom(7, WHY))
    rooms = [world.receive(7, 3, reader=reader) for reader in (0, 1)]
    world.settle()
    assert {room.state for room in rooms} == {RoomState.SUCCESS}
    world.check_empty()


def test_a_declined_room_that_decode_has_aborted_is_over_for_the_engine() -> None:
    world = connected()
    room = world.receive(7, 3)
    world.flush()
    world.feed("decode-0", ev.AbortRoom(7, "aborted"))
    world.settle()
    assert room.state is RoomState.FAILED
    world.feed("prefill-0", ev.DeclineRoom(7, WHY))
    world.send(7, 3)
    again = world.receive(7, 3)
    world.settle()
    assert again.state is RoomState.SUCCESS
