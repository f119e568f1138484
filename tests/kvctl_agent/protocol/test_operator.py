"""Requests of an operator: abort, release and drain, their answers, and memory that must not be freed."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.peer import PeerState
from kvctl_agent.protocol.ring import RegionState
from tests.support.folded import folded
from tests.support.protocol.invariants import Broken
from tests.support.protocol.moments import asked, compute, connected, granted, pass_time, run_until
from tests.support.protocol.scenarios import open_and_compute
from tests.support.protocol.simulation import SECOND, TIMING, Instance, World, direct, mixed


def ask(world: World, name: str, event: ev.Event) -> ev.Answered:
    """Tells one machine; its answer."""
    actions = world.machines[name].handle(event, world.now_ns)
    for action in actions:
        world._act(name, action)
    (answer,) = [action for action in actions if isinstance(action, ev.Answered)]
    assert answer.ticket == getattr(event, "ticket", None)
    return answer


def release(world: World, **of: Any) -> ev.Answered:
    return ask(world, "decode-0", ev.ReleaseHeld(9, **of))


def serial(world: World) -> int:
    (allocation,) = world.d().state.grant_table.allocations()
    return allocation.region.serial


def begun() -> World:
    """One room of one part, whose write has begun and not completed."""
    world = connected(ring=4, chunk_pages=1)
    world.receive(7, 1)
    world.flush()
    world.send(7, 1)
    while not world.flying:
        world.happen(world.pool.pop(world.ready()[0]))
    return world


def lost(*, dead: bool) -> World:
    """The writer is silent and lost with a write in flight; `dead`: its process is gone, and nobody has proof."""
    world = begun()
    if dead:
        world.kill("prefill-0", proven=False)
    else:
        world.paused.add("prefill-0")
    pass_time(world, 20)
    (allocation,) = world.d().state.grant_table.allocations()
    assert allocation.state is RegionState.QUARANTINED
    return world


class TestAbort:
    @pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
    def test_once_again_and_of_a_room_that_nobody_knows(self, name: str) -> None:
        world = begun()
        answer = ask(world, name, ev.AbortRoom(7, "enough of it", 9))
        assert answer.result == "aborted"
        again = ask(world, name, ev.AbortRoom(7, "enough of it", 9))
        assert (again.result, again.text) == ("unchanged", "room 7 is Failed already")
        assert ask(world, name, ev.AbortRoom(8, "enough", 9)).result == "unknown"
        world.settle()
        (room,) = world.rooms.values()
        assert room.state is RoomState.FAILED
        assert room.failure is not None
        assert room.failure["text"] == "enough of it"
        world.check_empty()

    def test_an_engine_gets_no_answer(self) -> None:
        world = begun()
        actions = world.machines["decode-0"].handle(ev.AbortRoom(7, "enough"), world.now_ns)
        assert not [action for action in actions if isinstance(action, ev.Answered)]


class TestReleaseOfAnAllocation:
    def test_an_unwritten_one_is_asked_back_and_its_part_gets_another(self) -> None:
        world = asked(1)
        granted(world)
        first = serial(world)
        answer = release(world, serial=first)
        assert (answer.result, answer.freed) == ("revoking", ())
        assert "prefill-0 was asked to give it back" in answer.text
        assert [allocation.region.serial for allocation in world.d().state.grant_table.allocations()] == [first]
        pass_time(world, 2)
        assert serial(world) > first
        assert release(world, serial=first).text == f"allocation {first} is free already"
        compute(world, 1)
        world.feed("prefill-0", ev.Finish(7, -1, 1))
        world.settle()
        assert [room.state for room in world.rooms.values()] == [RoomState.SUCCESS]

    @pytest.mark.parametrize("force", [False, True])
    @pytest.mark.parametrize("answered", [False, True])
    def test_one_that_is_being_written_stays_its_writers_and_others_go_past_it(
        self, answered: bool, force: bool
    ) -> None:
        """Whether its writer has said so, or has not answered yet; force changes nothing while it is heard."""
        world = begun()
        held = serial(world)
        assert release(world, serial=held, force=force).result == "revoking"
        if answered:
            run_until(world, "complete")
        answer = release(world, serial=held, force=force)
        assert (answer.result, answer.freed) == ("aside", ())
        assert ("is writing it" if answered else "has not given it back") in answer.text
        assert release(world, serial=held, force=force).result == "unchanged"
        assert serial(world) == held
        world.settle()
        assert [room.state for room in world.rooms.values()] == [RoomState.SUCCESS]
        world.check_empty()

    @pytest.mark.parametrize("force", [False, True])
    def test_one_that_pins_the_ring_lets_others_past(self, force: bool) -> None:
        """Its writer has stopped before it wrote, is not suspected yet, and will go on one day."""
        world = connected(others=[Instance(ParallelConfig())], ring=4, chunk_pages=1)
        first = world.receive(7, 1)
        world.flush()
        world.feed("prefill-0", ev.SendRoom(7))
        world.feed("prefill-0", ev.Prefetch(7))
        world.flush()
        held = serial(world)
        world.paused.add("prefill-0")
        second = world.receive(20, 4, instance=1)
        world.flush()
        world.send(20, 4, instance=1)
        world.flush()
        assert second.state is not RoomState.SUCCESS, "it waits behind"
        assert release(world, serial=held, force=force).result == "revoking"
        world.flush()
        assert release(world, serial=held, force=force).result == "aside"
        pass_time(world, 1)
        assert second.state is RoomState.SUCCESS
        assert [allocation.region.serial for allocation in world.d().state.grant_table.allocations()] == [held]
        world.paused.clear()
        world.feed("prefill-0", ev.AbortRoom(7, "enough"))
        world.settle()
        assert first.state is RoomState.FAILED
        world.check_empty()

    def test_by_force_where_its_writer_is_silent(self) -> None:
        world = asked(1)
        granted(world)
        held = serial(world)
        world.kill("prefill-0", proven=False)
        pass_time(world, 5)
        assert world.d().peers["prefill-0"].state is PeerState.SUSPECT
        answer = release(world, serial=held, force=True)
        assert (answer.result, answer.freed) == ("released", (held,))
        assert answer.text.startswith(f"allocation {held} of room 7 is freed by force; its room still holds its pages")
        assert world.d().state.grant_table.ring.used_bytes == 0
        # Its writer may come back and write there: the room is given up.
        failure = world.d().rooms[7].failure
        assert failure is not None
        assert "freed allocation" in failure["text"]

    @pytest.mark.parametrize("force", [False, True])
    def test_one_that_has_landed_is_never_taken(self, force: bool) -> None:
        world = begun()
        run_until(world, "scatter")
        answer = release(world, serial=serial(world), force=force)
        assert answer.result == "refused"
        assert "has landed and is being scattered" in answer.text
        world.settle()
        assert [room.state for room in world.rooms.values()] == [RoomState.SUCCESS]

    def test_one_that_was_never_given(self) -> None:
        world = begun()
        for number in (0, serial(world) + 1):
            answer = release(world, serial=number)
            assert (answer.result, answer.freed) == ("refused", ())
            assert "was ever given" in answer.text

    def test_a_quarantined_one_needs_force_and_the_answer_names_the_process(self) -> None:
        world = lost(dead=True)
        held = serial(world)
        answer = release(world, serial=held)
        assert (answer.result, answer.freed) == ("refused", ())
        peer = world.d().peers["prefill-0"]
        assert peer.info is not None
        assert f"prefill-0 (process {peer.info.pid} on its host) may still write to it" in answer.text
        assert serial(world) == held
        answer = release(world, serial=held, force=True)
        assert (answer.result, answer.freed) == ("released", (held,))
        assert "kvctl staging release --room 7" in answer.text
        assert world.d().state.grant_table.ring.used_bytes == world.d().state.grant_table.quarantined_bytes == 0
        (room,) = world.rooms.values()
        assert not room.released, "its pages may be written just as well"
        assert release(world, room=7, force=True).result == "released"
        assert room.released
        world.check_empty()

    def test_a_writer_that_cannot_be_asked(self) -> None:
        world = asked(1)
        granted(world)
        world.d().peers["prefill-0"].state = PeerState.CONNECTING
        answer = release(world, serial=serial(world))
        assert (answer.result, answer.freed) == ("aside", ())


class TestReleaseOfARoom:
    def test_pages_and_ring_are_free_by_force_alone(self) -> None:
        world = lost(dead=True)
        (room,) = world.rooms.values()
        answer = release(world, room=7)
        assert (answer.result, answer.freed, answer.drained) == ("refused", (), ())
        assert not room.released
        held = serial(world)
        answer = release(world, room=7, force=True)
        assert (answer.result, answer.freed, answer.drained) == ("released", (held,), ("prefill-0",))
        assert "1 allocation freed by force, and its pages are the engine's again" in answer.text
        assert room.released
        assert release(world, room=7, force=True).result == "unknown"
        world.check_empty()

    def test_the_oracle_sees_it_when_the_operator_is_wrong(self) -> None:
        """The writer was only stopped, and what it had in flight would land in pages that are somebody else's."""
        world = lost(dead=False)
        with pytest.raises(Broken, match="in flight"):
            release(world, room=7, force=True)

    @pytest.mark.parametrize("force", [False, True])
    def test_a_room_that_lives_or_whose_writers_are_about_to_answer_is_left_alone(self, force: bool) -> None:
        world = begun()
        answer = release(world, room=7, force=force)
        assert (answer.result, answer.freed) == ("refused", ())
        assert "kvctl rooms abort 7" in answer.text
        world.feed("decode-0", ev.AbortRoom(7, "enough"))
        answer = release(world, room=7, force=force)
        assert (answer.result, answer.freed) == ("refused", ())
        assert "prefill-0 was asked to drain" in answer.text
        world.settle()
        world.check_empty()

    def test_a_scatter_is_waited_for(self) -> None:
        world = begun()
        run_until(world, "scatter")
        world.feed("decode-0", ev.AbortRoom(7, "enough"))
        run_until(world, "scatter")
        answer = release(world, room=7, force=True)
        assert answer.result == "refused"
        assert "a part of it is being scattered" in answer.text
        world.settle()
        world.check_empty()


def meddle(world: World, dice: random.Random) -> None:
    """An operator releases whatever there is, without force."""
    book = world.d().state.grant_table
    serials = [allocation.region.serial for allocation in book.allocations()] or [1]
    ask(world, "decode-0", ev.ReleaseHeld(9, serial=dice.choice(serials)))
    ask(world, "decode-0", ev.ReleaseHeld(9, room=dice.choice([10, 11, 12, 13])))
    if dice.random() < 0.3:
        ask(world, dice.choice(list(world.machines)), ev.AbortRoom(dice.choice([10, 11, 12, 13]), "enough", 9))


@pytest.mark.parametrize("seed", range(40))
def test_no_byte_has_two_owners_whenever_an_operator_meddles(seed: int) -> None:
    """The oracle sees every byte; the operator has no proof of anything, and so uses no force."""
    dice = random.Random(seed)
    prefill, decode = dice.choice(
        [
            (ParallelConfig(tp=2), ParallelConfig()),
            (ParallelConfig(pp=2), ParallelConfig()),
            (ParallelConfig(tp=2), ParallelConfig(tp=2)),
        ]
    )
    world = World(prefill, decode, ring=dice.choice([2, 3, 4, 8]), choose=mixed)
    for room in range(10, 14):
        open_and_compute(world, dice, room, late=0.3)
        for _ in range(5):
            world.stir(dice, 15, loss=0.05, copies=0.05)
            meddle(world, dice)
        if dice.random() < 0.3:
            world.paused.add(dice.choice([name for name in world.machines if name != "decode-0"]))
            for _ in range(dice.choice([2, 20])):
                world.stir(dice, 10)
                world.tick(SECOND)
                meddle(world, dice)
            world.paused.clear()
    world.settle()
    world.check_empty()


class TestDrain:
    def test_what_is_open_ends_and_what_is_new_is_refused_at_once(self) -> None:
        world = connected(ParallelConfig(tp=2), chunk_pages=1)
        first = world.receive(7, 1)
        world.flush()
        for rank in (0, 1):
            world.feed(f"prefill-{rank}", ev.Drain(True))
        second = world.receive(8, 1)
        world.flush()
        assert second.state is RoomState.FAILED
        assert second.failure is not None
        assert second.failure["code"] == "KV_DRAINING"
        assert second.failure["text"] == "prefill-0 is draining and takes no new rooms"
        world.send(7, 1)
        world.settle(until=lambda: first.state.finished)
        assert first.state is RoomState.SUCCESS
        for rank in (0, 1):
            world.feed(f"prefill-{rank}", ev.Drain(False))
        third = world.receive(9, 1)
        world.flush()
        world.send(9, 1)
        world.settle(until=lambda: third.state.finished)
        assert third.state is RoomState.SUCCESS

    def test_a_room_that_its_engine_has_begun_is_not_new(self) -> None:
        world = connected(chunk_pages=1)
        world.send(7, 1)
        world.flush()
        world.feed("prefill-0", ev.Drain(True))
        room = world.receive(7, 1)
        world.settle()
        assert room.state is RoomState.SUCCESS


class TestRetime:
    @pytest.mark.parametrize(
        ("name", "code"), [("decode-0", "KV_ROOM_STUCK_WAITING"), ("prefill-0", "KV_ROOM_STUCK_TRANSFER")]
    )
    def test_a_shorter_wait_fails_a_room_that_has_waited_so_long(self, name: str, code: str) -> None:
        world = begun()
        (stuck,) = [item for item in world.pool if item.kind == "complete"]
        world.pool.remove(stuck)
        pass_time(world, 12)
        (room,) = world.rooms.values()
        assert not room.state.finished
        world.feed(name, ev.SetTimeouts(TIMING.bootstrap_ns, 10 * SECOND))
        pass_time(world, 2)
        assert room.state is RoomState.FAILED
        assert room.failure is not None
        assert (room.failure["rank"], room.failure["code"]) == (name, code)
        world.pool.append(stuck)
        world.settle()
        world.check_empty()

    def test_other_periods_and_those_of_peers_stay_and_tombstones_keep_as_long(self) -> None:
        world = begun()
        for name, machine in world.machines.items():
            world.feed(name, ev.SetTimeouts(50 * SECOND, 60 * SECOND))
            wanted = msgspec.structs.replace(TIMING, bootstrap_ns=50 * SECOND, waiting_ns=60 * SECOND)
            assert machine.timing == wanted
            assert [peer.timing for peer in machine.peers.values()] == [wanted]
            assert machine.state.tombstones._lifetime_ns == 50 * SECOND


def test_a_number_that_was_refused_while_draining_is_taken_after_it() -> None:
    world = connected(choose=direct)
    world.feed("prefill-0", ev.Drain(True))
    for _ in range(2):
        world.receive(7, 4)
        world.flush()
        world.tick(4 * world.timing.resend_ns)
        world.flush()
        assert folded(world.d().telemetry).rooms.history(1)[0]["failure"]["code"] == "KV_DRAINING"  # type: ignore[index]
    world.feed("prefill-0", ev.Drain(False))
    world.receive(7, 4)
    world.flush()
    assert [room.state for room in world.d().rooms.values()] == [RoomState.WAITING_FOR_INPUT]
    world.send(7, 4)
    world.settle()
    world.check_empty()
