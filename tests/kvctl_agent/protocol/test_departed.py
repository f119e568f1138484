"""Ranks that are on no roster any more: a decode rank does not accumulate them."""

from __future__ import annotations

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.peer import PeerState
from tests.support.protocol.moments import connected, pass_time
from tests.support.protocol.simulation import Instance, World, registry


def replace(world: World, life: int) -> tuple[str, ...]:
    """The instance starts anew under other names, as pods do; its old ranks are gone."""
    names = (f"prefill-{life}-0", f"prefill-{life}-1")
    for name in world.d().roster(registry(0)):
        peer = world.d().peers[name]
        world.feed("decode-0", ev.PeerDead(name, peer.incarnation, "process has ended"))
    world.feed("decode-0", ev.RosterKnown(registry(0), names))
    return names


def test_a_lost_rank_that_left_its_roster_is_forgotten() -> None:
    world = connected(ParallelConfig(tp=2))
    for life in range(50):
        names = replace(world, life)
        pass_time(world, 2)
    assert set(world.d().peers) == set(names)


def test_it_is_kept_while_a_room_still_waits_for_it() -> None:
    """Its pages are not free before it has drained, so it must still be known when it says so."""
    world = connected(ParallelConfig(tp=2))
    room = world.receive(7, 4)
    world.flush()
    world.paused |= {"prefill-0", "prefill-1"}
    pass_time(world, 20)  # silent and not proven dead: what they may write is quarantined
    assert room.state is RoomState.FAILED
    world.feed("decode-0", ev.RosterKnown(registry(0), ("prefill-2", "prefill-3")))
    pass_time(world, 2)
    assert {"prefill-0", "prefill-1"} <= set(world.d().peers)
    for name in ("prefill-0", "prefill-1"):
        world.feed("decode-0", ev.PeerDead(name, world.d().peers[name].incarnation, "process has ended"))
    pass_time(world, 2)
    assert not world.d().rooms
    assert set(world.d().peers) == {"prefill-2", "prefill-3"}


class TestDisconnect:
    """The engine says that an instance has ended or was replaced."""

    def test_its_rooms_fail_and_its_ranks_are_forgotten_once_they_have_drained(self) -> None:
        world = connected(ParallelConfig(tp=2), others=[Instance(ParallelConfig())])
        own, other = world.receive(7, 4), world.receive(8, 4, instance=1)
        world.send(7, 4, ranks=[0])
        world.flush()
        world.feed("decode-0", ev.DisconnectInstance(registry(0)))
        assert own.failure["code"] == "KV_PEER_LOST"
        assert own.failure["text"] == "room 7: its prefill instance at registry-0 was disconnected by the engine"
        assert set(world.d().peers) == {"prefill-0", "prefill-1", "p1-prefill-0"}, "they are asked to drain"
        assert (world.d().roster(registry(0)), world.d().missing_peers) == ((), [])
        pass_time(world, 2)
        assert (own.released, set(world.d().peers)) == (True, {"p1-prefill-0"})
        assert world.sent["prefill-0", 7] is RoomState.FAILED
        world.send(8, 4, instance=1)
        world.settle()
        assert other.state is RoomState.SUCCESS
        world.check_empty()

    def test_lost_ranks_that_no_room_waits_for_are_forgotten_at_once(self) -> None:
        world = connected(ParallelConfig(tp=2))
        world.paused |= {"prefill-0", "prefill-1"}
        pass_time(world, 20)
        assert world.d().peers["prefill-0"].state is PeerState.LOST
        world.feed("decode-0", ev.DisconnectInstance(registry(0)))
        assert not world.d().peers

    def test_its_rank_names_are_free_for_its_successor(self) -> None:
        world = connected(others=[Instance(ParallelConfig())])
        world.feed("decode-0", ev.RosterKnown(registry(1), ("prefill-0",)))
        assert world.receive(7, 4, instance=1).failure["code"] == "KV_COMPAT_MISMATCH"
        actions = world.d().handle(ev.DisconnectInstance(registry(0)), world.now_ns)
        assert ev.FindInstance(registry(1)) in actions
        world.feed("decode-0", ev.RosterKnown(registry(1), ("prefill-0",)))
        assert world.d().roster(registry(1)) == ("prefill-0",)
