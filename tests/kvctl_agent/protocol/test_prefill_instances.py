"""One decode instance with several prefill instances of different layouts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.peer import PeerState
from tests.support.protocol.moments import connected, pass_time
from tests.support.protocol.simulation import SECOND, TIMING, Instance, World, registry

DEEP = ModelShape(4, 2, 32, 32, 2)


def two(other: Instance | None = None, **options: object) -> World:
    """Instance 0 of two tp ranks and one more; rooms 7 are of the first and 8 of the other."""
    second = other or Instance(ParallelConfig(pp=2, stages=(1, 3)))
    return connected(ParallelConfig(tp=2), others=[second], **{"shape": DEEP, **options})


def test_an_instance_is_asked_for_once_when_the_first_room_wants_it() -> None:
    world = World(ParallelConfig(), ParallelConfig(), introduced=False)
    machine = world.d()
    room = ev.OpenRoom(7, 1, np.empty(0, np.int32), 0, 0, -1, "somewhere:1")
    actions = machine.handle(room, world.now_ns)
    assert [action.instance for action in actions if isinstance(action, ev.FindInstance)] == ["somewhere:1"]
    actions = machine.handle(msgspec.structs.replace(room, room=8), world.now_ns)
    assert not [action for action in actions if isinstance(action, ev.FindInstance)]


def test_an_instance_that_never_answers_fails_its_own_rooms_and_is_named() -> None:
    world = two(Instance(ParallelConfig(), answers=False))
    lost = world.receive(8, 2, instance=1)
    world.receive(7, 2)
    world.send(7, 2)
    world.flush()
    assert world.rooms["decode-0", 7, 1001].state is RoomState.SUCCESS
    pass_time(world, TIMING.lost_ns // SECOND - 1)
    assert lost.state is RoomState.BOOTSTRAPPING
    pass_time(world, 2)
    assert lost.failure["code"] == "KV_ROOM_STUCK_BOOTSTRAP"
    assert lost.failure["text"].endswith("the prefill instance at registry-1: no answer from its registry")
    later = world.receive(9, 2)
    world.send(9, 2)
    world.flush()
    assert later.state is RoomState.SUCCESS


def test_a_rank_name_that_another_instance_uses_is_refused_and_stays_so() -> None:
    world = two(Instance(ParallelConfig(tp=2), answers=False))
    waiting = world.receive(8, 2, instance=1)
    world.feed("decode-0", ev.RosterKnown(registry(1), ("prefill-1", "prefill-9")))
    later = world.receive(9, 2, instance=1)
    for room in (waiting, later):
        assert room.failure["code"] == "KV_COMPAT_MISMATCH"
        assert room.failure["text"] == (
            "prefill-1 of registry-1 is in use by the instance at registry-0: give every agent its own name, "
            "or set name_suffix"
        )
    own = world.receive(7, 2)
    world.send(7, 2)
    world.settle()
    assert own.state is RoomState.SUCCESS, "the one that was there is not harmed"
    world.feed("decode-0", ev.RosterKnown(registry(1), world.names_of(1)))
    world.flush()
    renamed = world.receive(10, 2, instance=1)
    world.send(10, 2, instance=1)
    world.settle()
    assert renamed.state is RoomState.SUCCESS


def test_a_name_is_free_again_when_the_rank_that_had_it_is_lost() -> None:
    """An instance that starts anew elsewhere, before its old life is known to be over, is not refused for ever."""
    world = two(Instance(ParallelConfig(tp=2)))
    world.feed("decode-0", ev.RosterKnown(registry(1), ("prefill-1", "prefill-9")))
    assert world.receive(8, 2, instance=1).failure["code"] == "KV_COMPAT_MISMATCH"
    world.kill("prefill-1")
    world.settle()
    room = world.receive(10, 2, instance=1)
    world.send(10, 2, instance=1)
    world.settle()
    assert room.state is RoomState.SUCCESS


def test_a_rank_that_has_moved_to_another_registry_is_followed() -> None:
    """Its old instance is gone: the name is free."""
    world = connected()
    world.kill("prefill-0")
    world.feed("decode-0", ev.RosterKnown("elsewhere:1", ("prefill-0",)))
    assert (world.d().roster("registry-0"), world.d().roster("elsewhere:1")) == ((), ("prefill-0",))
    world._start("prefill-0")
    pass_time(world, 5)
    assert world.d().missing_peers == []


def test_an_instance_that_does_not_fit_fails_its_own_rooms_and_names_the_factor() -> None:
    world = World(ParallelConfig(), ParallelConfig(), others=[Instance(ParallelConfig())])
    local = world.p(0, 1).local
    world.machines["p1-prefill-0"] = world._machine(msgspec.structs.replace(local, transport="mooncake"))
    waiting = world.receive(8, 2, instance=1)
    world.connect()
    assert waiting.failure["text"] == "p1-prefill-0 refused: transport mooncake ≠ simulated"
    later = world.receive(9, 2, instance=1)
    assert later.failure["code"] == "KV_COMPAT_MISMATCH"
    own = world.receive(7, 2)
    world.send(7, 2)
    world.settle(ticks=1)
    assert own.state is RoomState.SUCCESS


def test_a_room_of_an_incomplete_instance_says_what_its_registry_says() -> None:
    world = two(Instance(ParallelConfig(), answers=False))
    lost = world.receive(8, 2, instance=1)
    world.feed("decode-0", ev.RosterMissing(registry(1), "6 of 8 prefill ranks registered, missing tp=2,3"))
    pass_time(world, TIMING.bootstrap_ns // SECOND + 2)
    assert lost.failure["text"].endswith("6 of 8 prefill ranks registered, missing tp=2,3")


def test_ranks_of_one_instance_must_agree_with_each_other() -> None:
    world = World(ParallelConfig(cp=2), ParallelConfig())
    local = world.p(1).local
    world.machines["prefill-1"] = world._machine(msgspec.structs.replace(local, cp_mode="all"))
    world.connect()
    for _ in range(4):  # long enough for an earlier life to be found out
        world.tick(SECOND)
        world.flush()
    states = {name: world.d().peers[name].state for name in world.prefill_names}
    assert sorted(states.values()) == [PeerState.READY, PeerState.REFUSED]
    (refused,) = [peer for peer in world.d().peers.values() if peer.state is PeerState.REFUSED]
    assert refused.differences[0].startswith("cp_mode ")
    assert refused.differences[0].endswith(f" on {refused.name}")


def test_an_instance_that_starts_anew_with_another_layout_fails_no_room_that_waits_for_it() -> None:
    """Its first rank says hello while the earlier life of the second has not been found out yet."""
    world = connected(ParallelConfig(cp=2))
    for name in world.prefill_names:
        if name == "prefill-1":
            world.flush()  # the new prefill-0 is heard beside the old prefill-1
            assert world.d().peers["prefill-0"].state is PeerState.CONNECTING
            room = world.receive(7, 2)
        world.kill(name)
        place = world.instances[0]
        world.instances = (replace(place, cp_mode="all"),)
        world._start(name)
        world.tick(SECOND)
    pass_time(world, 3)
    world.send(7, 2)
    world.settle()
    assert room.state is RoomState.SUCCESS
