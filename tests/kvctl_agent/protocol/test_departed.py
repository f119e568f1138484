"""Ranks that are on no roster any more: a decode rank does not accumulate them."""

from __future__ import annotations

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from tests.support.protocol.simulation import SECOND, World, registry


def replace(world: World, life: int) -> tuple[str, ...]:
    """The instance starts anew under other names, as pods do; its old ranks are gone."""
    names = (f"prefill-{life}-0", f"prefill-{life}-1")
    for name in world.d().roster(registry(0)):
        peer = world.d().peers[name]
        world.feed("decode-0", ev.PeerDead(name, peer.incarnation, "process has ended"))
    world.feed("decode-0", ev.RosterKnown(registry(0), names))
    return names


def pass_time(world: World, seconds: int) -> None:
    for _ in range(seconds):
        world.tick(SECOND)
        world.flush()


def test_a_lost_rank_that_left_its_roster_is_forgotten() -> None:
    world = World(ParallelConfig(tp=2), ParallelConfig())
    world.connect()
    for life in range(50):
        names = replace(world, life)
        pass_time(world, 2)
    assert set(world.d().peers) == set(names)


def test_it_is_kept_while_a_room_still_waits_for_it() -> None:
    """Its pages are not free before it has drained, so it must still be known when it says so."""
    world = World(ParallelConfig(tp=2), ParallelConfig())
    world.connect()
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
