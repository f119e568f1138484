"""One room end to end over an unreliable network: opened, granted, sent, landed, ended, forgotten."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.peer import PeerState
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from tests.support.protocol.moments import connected, run_until
from tests.support.protocol.oracle import PAGE_SIZE
from tests.support.protocol.simulation import World, direct


def test_what_an_engine_computed_for_a_failed_room_does_not_go_into_the_next_one_of_that_number() -> None:
    world = connected(choose=direct)
    world.receive(7, 2)
    world.flush()
    world.feed("prefill-0", ev.SendRoom(7))
    world.feed("decode-0", ev.AbortRoom(7, "enough"))
    world.flush()
    world.receive(7, 2)
    world.flush()
    world.feed("prefill-0", ev.SendPages(7, np.arange(2, dtype=np.int32), True, 1))  # of the first life
    world.feed("prefill-0", ev.Finish(7, -1, 1))
    assert not [item for item in world.pool if item.kind == "begin"]


@pytest.mark.parametrize("claimed_first", [True, False])
def test_prefill_learns_the_shortest_prefix_once_every_decode_rank_has_opened_the_room(claimed_first: bool) -> None:
    world = connected(ParallelConfig(), ParallelConfig(tp=2), choose=direct)
    if claimed_first:
        world.feed("prefill-0", ev.SendRoom(7))
        assert world.prefixes["prefill-0", 7] is None
    world.receive(7, 5, reader=0, prefix=3)
    world.flush()
    if claimed_first:
        assert world.prefixes["prefill-0", 7] is None
    world.receive(7, 5, reader=1, prefix=2)
    world.flush()
    if not claimed_first:
        world.feed("prefill-0", ev.SendRoom(7))
    assert world.prefixes["prefill-0", 7] == 2 * PAGE_SIZE


def test_any_thread_may_ask_for_the_prefix_while_a_room_is_opened_or_recalled() -> None:
    """The control thread changes one field after the other."""
    world = connected(choose=direct)
    world.receive(7, 5, prefix=3)
    world.flush()
    room = world.p().rooms[7]
    assert world.p().opened_prefix(7) == 3 * PAGE_SIZE
    room.transfers.clear()
    assert world.p().opened_prefix(7) is None


def test_only_a_room_that_the_prefill_engine_has_claimed_is_sent() -> None:
    world = connected(choose=direct)
    world.receive(7, 5)
    world.flush()
    assert not world.p().sends(7)
    world.feed("prefill-0", ev.SendRoom(7))
    assert (world.p().sends(7), world.d().sends(7)) == (True, False)
    world.feed("prefill-0", ev.AbortRoom(7, "enough"))
    world.settle()
    assert not world.p().sends(7)


def test_prefill_learns_the_prefix_of_a_room_that_has_ended_before_send() -> None:
    world = connected()
    world.receive(7, 3, prefix=3, aux=-1)
    world.flush()
    world.feed("prefill-0", ev.SendRoom(7))
    assert world.sent["prefill-0", 7] is RoomState.SUCCESS
    assert world.prefixes["prefill-0", 7] == 3 * PAGE_SIZE


def test_a_room_number_is_used_once_at_a_time() -> None:
    world = connected()
    world.receive(7, 2)
    with pytest.raises(LocalProtocolError, match="room 7 is open already"):
        world.receive(7, 2, nonce=5)
    world.rooms.pop(("decode-0", 7, 5))
    world.feed("prefill-0", ev.SendRoom(7))
    with pytest.raises(LocalProtocolError, match="room 7 is being sent already"):
        world.feed("prefill-0", ev.SendRoom(7))


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_a_room_number_fits_64_bits(number: int) -> None:
    world = World(ParallelConfig(), ParallelConfig())
    with pytest.raises(LocalProtocolError, match="is no room number"):
        world.feed("prefill-0", ev.SendRoom(number))
    with pytest.raises(LocalProtocolError, match="is no room number"):
        world.feed("decode-0", ev.OpenRoom(number, 1, np.empty(0, np.int32), 0, 0, -1, "registry-0"))
    with pytest.raises(LocalProtocolError, match="is no room number"):
        world.feed("decode-0", ev.OpenRoom(1, number, np.empty(0, np.int32), 0, 0, -1, "registry-0"))


def test_a_second_opening_of_an_active_number_is_refused() -> None:
    """By another dp rank: their bytes must not mix."""
    world = connected(ParallelConfig(), ParallelConfig(dp=2))
    world.receive(7, 2, reader=0)
    world.flush()
    other = world.receive(7, 2, reader=1)
    world.flush()
    assert other.state is RoomState.FAILED
    assert other.failure["code"] == "KV_ROOM_DUPLICATE"
    assert "room 7 is active for decode-0" in other.failure["text"]
    world.send(7, 2)
    world.settle()
    assert world.rooms["decode-0", 7, 1000].state is RoomState.SUCCESS


def test_a_rank_that_owes_nothing_learns_how_a_room_ended_even_if_it_was_thought_lost() -> None:
    world = connected(ParallelConfig(tp=4))
    world.receive(7, 2)
    idle = next(name for rank, name in enumerate(world.prefill_names) if rank not in {s.writer for s in world.owed(7)})
    world.flush()
    world.send(7, 2)
    while world.rooms["decode-0", 7, 1000].state is not RoomState.SUCCESS:
        places = [n for n in world.ready() if not (world.pool[n].kind == "message" and world.pool[n].to == idle)]
        world.happen(world.pool.pop(places[0]))
    world.pool = [item for item in world.pool if item.to != idle or item.kind != "message"]
    world.d().peers[idle].state = PeerState.LOST
    world.d()._on_peer_lost(world.d().peers[idle], "test")
    world.settle(ticks=20)
    assert world.sent[idle, 7] is RoomState.SUCCESS


def test_tags_that_fit_nothing_change_only_a_counter() -> None:
    world = connected()
    world.receive(7, 2, aux=-1)
    world.flush()
    here = world.d().local.incarnation
    odd = [
        Tag(PartKind.KV, here + 1, 7, 1000, 0, PartKey(0, 0, 0, 2)),
        Tag(PartKind.KV, here, 8, 1000, 0, PartKey(0, 0, 0, 2)),
        Tag(PartKind.KV, here, 7, 1001, 0, PartKey(0, 0, 0, 2)),
        Tag(PartKind.KV, here, 7, 1000, 0, PartKey(1, 0, 0, 2)),
        Tag(PartKind.KV, here, 7, 1000, 0, PartKey(0, 1, 0, 2)),
        Tag(PartKind.KV, here, 7, 1000, 0, PartKey(0, 0, 0, 3)),
        Tag(PartKind.KV, here, 7, 1000, 9, PartKey(0, 0, 0, 2)),
        Tag(PartKind.AUX, here, 7, 1000, 0, PartKey(0, 0, 0, 0)),
    ]
    for tag in odd:
        world.feed("decode-0", ev.Arrived(tag, 1))
    assert world.d().telemetry.metrics.total("kvctl_tags_dropped_total") == len(odd)
    assert world.rooms["decode-0", 7, 1000].state is RoomState.WAITING_FOR_INPUT


def test_a_number_used_again_before_its_writer_is_done_with_it_is_taken_a_little_later() -> None:
    """The decode side has every byte and is done; the writer has not been told yet that its write has ended."""
    world = connected()
    world.receive(7, 2)
    world.flush()
    world.send(7, 2)

    def flush_without_events() -> None:
        run_until(world, "event")

    flush_without_events()
    assert 7 not in world.d().rooms
    again = world.receive(7, 2)
    flush_without_events()
    assert again.state is RoomState.BOOTSTRAPPING
    world.flush()
    world.sent.clear()
    world.sent_released.clear()
    world.send(7, 2)
    world.settle()
    assert again.state is RoomState.SUCCESS
    world.check_empty()


def test_a_number_can_be_used_again_before_the_writers_have_acknowledged_how_its_last_life_ended() -> None:
    world = connected(ParallelConfig(tp=2))
    for life in range(3):
        room = world.receive(7, 2)
        world.sent.clear()
        world.sent_released.clear()
        world.send(7, 2)
        while {room.state, *world.sent.values()} != {RoomState.SUCCESS}:
            world.happen(world.pool.pop(world.ready()[0]))
        world.pool.clear()  # no Ack arrives
        assert 7 in world.d().rooms, life
    world.settle()
    assert [room.state for room in world.rooms.values()] == [RoomState.SUCCESS] * 3
    world.check_empty()


def test_a_room_says_how_many_tokens_it_sends() -> None:
    opening = msg.RoomOpen(7, 1, b"", 2, 8, {})
    assert opening.tokens_to_send(16) == 6 * 16  # whole pages, if the engine did not say how long the prompt is
    assert msgspec.structs.replace(opening, tokens=120).tokens_to_send(16) == 120 - 32
    assert msgspec.structs.replace(opening, tokens=120, prefix_pages=8).tokens_to_send(16) == 0
    assert msgspec.structs.replace(opening, tokens=120, total_pages=0, prefill_only=True).tokens_to_send(16) == 0
