"""What the Goodbye of a decode rank means to rooms that it has received, and what an agent awaits before its own."""

from __future__ import annotations

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.plan import keeper
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from tests.support.protocol.moments import connected, give, messages_to, said, silence
from tests.support.protocol.simulation import SECOND, World, direct

KEPT_BY_1 = next(room for room in range(99) if keeper(World(decode=ParallelConfig(tp=2)).inputs, room, 0) == 1)


def deliver(world: World, *without: tuple[str, str]) -> None:
    """Executes all items but those of these kinds to these agents."""
    while places := [place for place in world.ready() if (world.pool[place].kind, world.pool[place].to) not in without]:
        world.happen(world.pool.pop(places[0]))


def received(*, drained: bool) -> World:
    """Room 7 is received by the only decode rank, which has said so and closed; no write was seen to complete."""
    world = connected(choose=direct)
    world.receive(7, 4)
    world.send(7, 4)
    deliver(world, ("event", "prefill-0"))
    assert world.rooms["decode-0", 7, 1000].state is RoomState.SUCCESS
    assert world.sent["prefill-0", 7] is not RoomState.SUCCESS
    world.feed("decode-0", ev.Shutdown(drained))
    deliver(world, ("event", "prefill-0"))
    assert world.p().peers["decode-0"].state == "lost"
    return world


@pytest.mark.parametrize("drained", [True, False])
@pytest.mark.parametrize("end", ["sent", "failed", "failed in flight"])
def test_a_room_that_a_decode_rank_had_received_before_it_closed_succeeds(end: str, drained: bool) -> None:
    world = received(drained=drained)
    ends = [item.what for item in world.pool if item.kind == "event"]
    assert ends
    world.pool.clear()
    for sent in ends:
        assert isinstance(sent, ev.PartSent)
        where = sent.peer, sent.room, sent.nonce, sent.kind, sent.key
        if end != "sent":
            in_flight = end == "failed in flight"
            failed = ev.PartFailed(*where, "KV_TRANSPORT", "the peer is gone", in_flight)
            world.feed("prefill-0", failed)
            sent = ev.PartSent(*where, dropped=True)
        if end != "failed":
            world.feed("prefill-0", sent)
    assert world.sent["prefill-0", 7] is RoomState.SUCCESS
    assert not world.p().rooms
    assert not world.p().state.transfers


def test_a_decode_rank_that_closes_costs_no_other_decode_rank_a_room_that_it_had_received() -> None:
    world = connected(ParallelConfig(), ParallelConfig(tp=2), choose=direct)
    for reader in (0, 1):
        world.receive(KEPT_BY_1, 4, reader=reader, nonce=1000 + reader)
    world.flush()
    world.send(KEPT_BY_1, 4)
    deliver(world, ("tag", "decode-1"))
    assert world.rooms["decode-0", KEPT_BY_1, 1000].state is RoomState.SUCCESS
    world.feed("decode-0", ev.Shutdown(True))
    deliver(world, ("tag", "decode-1"))
    world.flush()
    assert world.rooms["decode-1", KEPT_BY_1, 1001].state is RoomState.SUCCESS
    assert world.sent["prefill-0", KEPT_BY_1] is RoomState.SUCCESS


def test_a_decode_rank_that_closes_without_a_room_fails_it_on_all_ranks() -> None:
    world = connected(ParallelConfig(), ParallelConfig(tp=2), choose=direct)
    for reader in (0, 1):
        world.receive(KEPT_BY_1, 4, reader=reader, nonce=1000 + reader)
    world.flush()
    world.feed("decode-0", ev.Shutdown(True))
    world.flush()
    assert world.rooms["decode-1", KEPT_BY_1, 1001].failure["code"] == "KV_PEER_LOST"  # type: ignore[index]


class TestUnanswered:
    """Rooms whose end an agent must not take with it."""

    def test_a_success_until_the_prefill_rank_has_acknowledged_it(self) -> None:
        world = connected(choose=direct)
        world.receive(7, 4)
        world.send(7, 4)
        assert world.d().unanswered() == []
        while not messages_to(world, "prefill-0", msg.RoomDone):
            world.happen(world.pool.pop(world.ready()[0]))
        assert world.d().unanswered() == [7]
        world.flush()
        assert world.d().unanswered() == []

    def test_a_failure_until_it_is_acknowledged_or_drained_for(self) -> None:
        world = connected(choose=direct)
        for room in (7, 8):
            world.receive(room, 4, nonce=room)
        world.flush()
        world.feed("decode-0", ev.AbortRoom(7, "a test"))
        world.feed("prefill-0", ev.AbortRoom(8, "a test"))
        assert (world.d().unanswered(), world.p().unanswered()) == ([7], [8])
        world.flush()
        assert (world.d().unanswered(), world.p().unanswered()) == ([], [])

    def test_a_kept_room_until_every_other_decode_rank_has_it(self) -> None:
        world = connected(ParallelConfig(), ParallelConfig(tp=2), choose=direct)
        for reader in (0, 1):
            world.receive(KEPT_BY_1, 4, reader=reader, nonce=1000 + reader)
        world.send(KEPT_BY_1, 4)
        deliver(world, ("tag", "decode-0"))
        assert world.rooms["decode-1", KEPT_BY_1, 1001].state is RoomState.SUCCESS
        assert (world.d(0).unanswered(), world.d(1).unanswered()) == ([], [KEPT_BY_1])
        world.flush()
        assert world.d(1).unanswered() == []

    def test_nothing_of_a_peer_that_is_silent_or_gone(self) -> None:
        world = connected(choose=direct)
        world.receive(7, 4)
        world.flush()
        world.paused.add("prefill-0")
        world.feed("decode-0", ev.AbortRoom(7, "a test"))
        assert world.d().unanswered() == [7]
        silence(world, "prefill-0", 4)
        assert world.d().unanswered() == []
        assert world.d().peers["prefill-0"].state == "suspect"
        world.tick(SECOND)
        said(world, "prefill-0")
        give(world, msg.Bye(True), to="decode-0", by="prefill-0")
        assert world.d().unanswered() == []
