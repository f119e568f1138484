"""Grants: requested, granted once, gated, revoked, refused."""

from __future__ import annotations

import random

import pytest

from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.machine import Tombstones
from kvctl_agent.protocol.ring import GrantTable, Position, RegionState, Ring
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey, Tag
from tests.support.protocol.moments import asked, compute, connected, give, granted, part, pass_time, said
from tests.support.protocol.simulation import SECOND, UNIT, direct

ROOM = RoomKey("prefill-0", 7, 1)


def test_all_parts_of_a_room_are_asked_for_in_one_message() -> None:
    world = asked(3)
    (request,) = said(world, "decode-0")
    assert isinstance(request, msg.StagingRequest)
    assert [spec.chunk for spec in request.parts] == [0, 1, 2]
    world.feed("prefill-0", ev.Prefetch(7))
    assert said(world, "decode-0") == []


def test_the_same_request_gets_the_same_grant() -> None:
    world = asked(3)
    (request,) = said(world, "decode-0")
    give(world, request, request, to="decode-0", by="prefill-0")
    first, second = said(world, "prefill-0")
    assert isinstance(first, msg.StagingGrants)
    assert first == second
    assert len(world.d().state.grant_table) == 3


def test_a_request_for_what_the_plan_does_not_know_changes_only_a_counter() -> None:
    world = asked(2)
    said(world, "decode-0")
    odd = [(0, 0, 3, UNIT * 2), (2, 0, 2, 2 * UNIT), (0, 1, 1, UNIT), (0, 0, 2, UNIT), (0, 0, 2, 0), (0, 0, 2, 1 << 61)]
    give(world, msg.StagingRequest(7, 1000, [msg.PartSpec(*spec) for spec in odd]), to="decode-0", by="prefill-0")
    assert said(world, "prefill-0") == []
    assert len(world.d().state.grant_table) == 0
    assert world.d().telemetry.metrics.total("kvctl_control_dropped_total", "unknown-part") == len(odd)


def test_a_request_for_a_room_that_is_over_is_answered_so_that_nobody_waits() -> None:
    world = asked(1)
    give(world, msg.StagingRequest(99, 5, []), to="decode-0", by="prefill-0")
    answer = said(world, "prefill-0")[-1]
    assert isinstance(answer, msg.RoomFailed)
    assert (answer.room, answer.code) == (99, "KV_ROOM_UNKNOWN")


def test_the_watermark_is_told_to_those_whose_grants_it_opens() -> None:
    table = GrantTable(2 * UNIT)
    keys = [PartKey(0, 0, 0, 2), PartKey(0, 1, 0, 2), PartKey(1, 0, 0, 2)]
    peers = ["prefill-0", "prefill-0", "prefill-1"]
    held = [table.grant(ROOM._replace(peer=peer), key, UNIT, 0) for peer, key in zip(peers, keys, strict=True)]
    assert table.gates_any_peer
    assert not table.free(held[1].region.serial)
    assert table.take_opened() == []
    assert table.free(held[0].region.serial)
    assert table.take_opened() == ["prefill-1"]
    assert table.take_opened() == []
    assert not table.gates_any_peer


def test_a_gated_grant_that_is_given_back_gates_nobody() -> None:
    table = GrantTable(UNIT)
    table.grant(ROOM, PartKey(0, 0, 0, 2), UNIT, 0)
    table.free(table.grant(ROOM, PartKey(0, 1, 0, 2), UNIT, 0).region.serial)
    assert not table.gates_any_peer


def test_a_revoked_part_is_asked_for_again() -> None:
    world = asked(1)
    grants = granted(world)
    give(world, grants, msg.StagingRevoke(7, 1000, 0, 0, 2, grants.grants[0].serial))
    revoked, request = said(world, "decode-0")
    assert isinstance(revoked, msg.StagingRevoked)
    assert isinstance(request, msg.StagingRequest)


def test_a_request_for_a_part_whose_revoke_is_open_is_answered_with_the_revoke() -> None:
    """The writer's answer was lost, and whoever waited behind its region may wait no more."""
    world = asked(1)
    grants = granted(world)
    world.d().state.grant_table.allocations()[0].state = RegionState.REVOKING
    world.tick(SECOND)
    said(world, "prefill-0")
    give(world, msg.StagingRequest(7, 1000, [msg.PartSpec(0, 0, 2, 2 * UNIT)]), to="decode-0", by="prefill-0")
    assert said(world, "prefill-0") == [msg.StagingRevoke(7, 1000, 0, 0, 2, grants.grants[0].serial)]


def test_a_revoke_of_a_part_that_was_handed_on_is_too_late() -> None:
    world = asked(1)
    grants = granted(world)
    give(world, grants)
    compute(world, 1)
    give(world, msg.StagingRevoke(7, 1000, 0, 0, 2, grants.grants[0].serial))
    assert said(world, "decode-0") == [msg.TooLate(7, 1000, grants.grants[0].serial)]


def test_nothing_is_revoked_while_nobody_waits() -> None:
    world = asked(2, ring=8)
    world.flush()
    pass_time(world, 30)
    assert world.counts["StagingRevoke"] == 0


@pytest.mark.parametrize("other", [1, 2])
def test_a_tag_that_names_another_grant_than_the_live_one_changes_nothing(other: int) -> None:
    world = asked(1)
    serial = granted(world).grants[0].serial
    tag = Tag(PartKind.KV, world.d().local.incarnation, 7, 1000, serial + other, PartKey(0, 0, 0, 2))
    world.feed("decode-0", ev.Arrived(tag, 1))
    assert world.d().telemetry.metrics.total("kvctl_tags_dropped_total", "stale-grant") == 1
    assert not world.d().rooms[7].landed


def test_a_tag_without_a_grant_that_covers_half_of_a_granted_part_changes_nothing() -> None:
    world = asked(1)
    granted(world)
    world.feed(
        "decode-0", ev.Arrived(Tag(PartKind.KV, world.d().local.incarnation, 7, 1000, 0, PartKey(0, 0, 0, 1)), 1)
    )
    assert not world.d().rooms[7].landed
    assert len(world.d().state.grant_table) == 1


def test_a_tag_without_a_grant_does_not_free_a_region_that_is_being_scattered() -> None:
    """Reuse under a scatter: the part has landed, whatever else is said of it."""
    world = asked(1)
    serial = granted(world).grants[0].serial
    here = world.d().local.incarnation
    world.feed("decode-0", ev.Arrived(Tag(PartKind.KV, here, 7, 1000, serial, PartKey(0, 0, 0, 2)), 1))
    world.feed("decode-0", ev.Arrived(Tag(PartKind.KV, here, 7, 1000, 0, PartKey(0, 0, 0, 2)), 1))
    assert world.d().telemetry.metrics.total("kvctl_tags_dropped_total", "duplicate") == 1
    assert [allocation.state for allocation in world.d().state.grant_table.allocations()] == [RegionState.LANDED]


def test_a_grant_outside_the_ring_is_not_written() -> None:
    world = asked(1)
    said(world, "decode-0")
    for grant in (msg.Grant(0, 0, 2, 1, 3 * UNIT, 5 * UNIT, 0), msg.Grant(0, 0, 2, 1, 0, UNIT, 0)):
        give(world, msg.StagingGrants(7, 1000, [grant], [0, 0, 0]))
    assert part(world).grant is None


def test_with_the_direct_path_no_ring_is_asked_for() -> None:
    """With staging off the plain path runs: features cost nothing when unused."""
    world = connected(ParallelConfig(tp=2), choose=direct)
    world.receive(7, 4)
    world.send(7, 4)
    world.settle()
    assert set(world.counts) == {"Hello", "HelloAck", "RoomOpen", "RoomAccepted", "RoomDone", "Ack"}
    assert world.d().state.grant_table.ring.high_water_bytes == 0


def test_the_book_forgets_everything_of_a_region_that_is_free() -> None:
    dice = random.Random(3)
    table, ring = GrantTable(3 * UNIT), Ring(3 * UNIT)
    live: list[int] = []
    for step in range(300):
        if dice.random() < 0.55:
            live.append(table.grant(ROOM, PartKey(0, step, 0, 2), UNIT, 0).region.serial)
            ring.allocate(UNIT)
        elif live:
            serial = live.pop(dice.randrange(len(live)))
            for _ in range(dice.randrange(3)):  # again changes nothing
                table.quarantine(table.find(serial))  # type: ignore[arg-type]
            assert table.free(serial) == ring.free(serial)
            table.take_opened()
        assert table.ring.watermark == ring.watermark
    for serial in live:
        table.free(serial)
    assert [*table._by_serial, *table._by_part, *table._by_room, *table._gated] == []
    assert table.quarantined_bytes == 0
    assert table.ring.watermark == Position(table.ring.round, 0)


def test_tombstones_expire_and_are_bounded() -> None:
    tombstones: Tombstones[bool] = Tombstones(lifetime_ns=10, capacity=3)
    for number in range(5):
        tombstones.add(RoomKey("p", number, 1), True, number)
    assert len(tombstones) == 3
    assert RoomKey("p", 1, 1) not in tombstones
    tombstones.add(RoomKey("p", 2, 1), True, 9)
    tombstones.expire(13)
    assert RoomKey("p", 2, 1) in tombstones, "buried again, so it lives longer"
    assert RoomKey("p", 3, 1) not in tombstones
    tombstones.expire(100)
    assert len(tombstones) == 0
