"""Three rules of grants and watermarks that an explicit-state search showed to be necessary."""

from __future__ import annotations

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.ring import Position, RegionState
from tests.support.protocol.moments import asked, connected, give, granted, part, said
from tests.support.protocol.simulation import UNIT


class TestSerials:
    """Never reused within an incarnation; a revoked writer remembers, and an open revoke is answered by its serial."""

    def test_a_grant_up_to_the_revoked_serial_is_ignored_and_a_later_one_is_taken(self) -> None:
        world = asked(1)
        grants = granted(world)
        serial = grants.grants[0].serial
        give(world, msg.StagingRevoke(7, 1000, 0, 0, 2, serial))
        assert said(world, "decode-0")[0] == msg.StagingRevoked(7, 1000, serial)
        give(world, grants)
        assert part(world).grant is None
        later = msg.Grant(0, 0, 2, serial + 1, 0, 2 * UNIT, 0)
        give(world, msg.StagingGrants(7, 1000, [later], grants.watermark))
        assert part(world).grant == later

    def test_while_a_revoke_is_open_the_part_gets_no_answer_and_afterwards_a_new_serial(self) -> None:
        world = asked(1)
        (request,) = said(world, "decode-0")
        give(world, request, to="decode-0", by="prefill-0")
        said(world, "prefill-0")
        (allocation,) = world.d().state.grant_table.allocations()
        allocation.state = RegionState.REVOKING
        give(world, request, to="decode-0", by="prefill-0")
        assert said(world, "prefill-0") == []
        serial = allocation.region.serial
        give(world, msg.StagingRevoked(7, 1000, serial), request, to="decode-0", by="prefill-0")
        (grants,) = said(world, "prefill-0")
        assert isinstance(grants, msg.StagingGrants)
        assert grants.grants[0].serial > serial

    @pytest.mark.parametrize("answer", [msg.StagingRevoked, msg.TooLate])
    def test_answers_to_a_revoke_that_name_another_serial_are_ignored(self, answer: type[msg.StagingRevoked]) -> None:
        world = asked(1)
        granted(world)
        (allocation,) = world.d().state.grant_table.allocations()
        allocation.state = RegionState.REVOKING
        give(world, answer(7, 1000, allocation.region.serial + 1), to="decode-0", by="prefill-0")
        assert allocation.state is RegionState.REVOKING
        assert len(world.d().state.grant_table) == 1

    def test_a_writer_may_give_a_grant_back_unasked_and_too_late_answers_only_a_revoke(self) -> None:
        world = asked(1)
        granted(world)
        (allocation,) = world.d().state.grant_table.allocations()
        give(world, msg.TooLate(7, 1000, allocation.region.serial), to="decode-0", by="prefill-0")
        assert not allocation.posted
        give(world, msg.StagingRevoked(7, 1000, allocation.region.serial), to="decode-0", by="prefill-0")
        assert len(world.d().state.grant_table) == 0

    def test_a_writer_whose_tombstone_has_it_says_that_it_is_revoked(self) -> None:
        """Also of a room that it has buried, and of a revoke that comes again."""
        world = asked(1)
        grants = granted(world)
        serial = grants.grants[0].serial
        revoke = msg.StagingRevoke(7, 1000, 0, 0, 2, serial)
        give(world, revoke, revoke)
        answers = [message for message in said(world, "decode-0") if isinstance(message, msg.StagingRevoked)]
        assert answers == [msg.StagingRevoked(7, 1000, serial)] * 2
        world.feed("prefill-0", ev.AbortRoom(7, "enough"))
        world.settle()
        give(world, revoke)
        assert said(world, "decode-0") == [msg.StagingRevoked(7, 1000, serial)]


class TestIncarnations:
    """Grants and watermarks carry the decode incarnation."""

    def test_an_old_watermark_opens_no_new_grants_and_masks_no_new_watermark(self) -> None:
        world = connected()
        old = world.d().local.incarnation
        world.feed("prefill-0", ev.Received("decode-0", old, msg.Watermark(9, 512, 99)))
        assert world.p().peers["decode-0"].gate.position == Position(9, 512)
        world.restart("decode-0")
        world.connect()
        gate = world.p().peers["decode-0"].gate
        assert gate.position == Position(0, 0)
        world.feed("prefill-0", ev.Received("decode-0", old, msg.Watermark(9, 512, 100)))
        assert gate.position == Position(0, 0)
        world.feed("prefill-0", ev.Received("decode-0", world.d().local.incarnation, msg.Watermark(1, 0, 1)))
        assert gate.position == Position(1, 0)


class TestParkedParts:
    """A gated part blocks no worker and holds no staging buffer."""

    def test_writers_with_different_queue_orders_do_not_lock_each_other_out(self) -> None:
        """Each would wait with one room's part in its only worker for the ring bytes of the other's."""
        world = connected(ParallelConfig(tp=2), ring=2, chunk_pages=1)
        for room in (7, 8):
            world.receive(room, 3)
        world.flush()
        for room in (7, 8):
            world.send(room, 3)
        calls = {(item.to, item.what[0].room): item.what for item in world.pool}
        world.pool.clear()
        (first, second), (later, earlier) = (
            [calls[name, room] for room in (7, 8)] for name in ("prefill-0", "prefill-1")
        )
        # Both ask for room 7 first; the second one's engine then computes room 8 first.
        for name, call in [
            *(("prefill-0", call) for call in (*first, *second)),
            *(("prefill-1", call) for call in (*later[:2], *earlier[:2], *earlier[2:], *later[2:])),
        ]:
            world.feed(name, call)
        before = world.now_ns
        world.flush()
        assert {room.state for room in world.rooms.values()} == {RoomState.SUCCESS}
        assert world.now_ns == before
