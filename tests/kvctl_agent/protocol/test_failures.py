"""Failed rooms: all ranks get the first cause, queued parts are dropped, memory is reused only after the drain."""

from __future__ import annotations

import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from tests.support.protocol.moments import connected, run_until, under_way
from tests.support.protocol.simulation import SECOND, TIMING, World, direct, staged

STAGES = [0, 5, 12, 20, 30, 40, 60]


@pytest.mark.parametrize("steps", STAGES)
@pytest.mark.parametrize("by", ["decode-0", "prefill-0", "prefill-1"])
def test_an_abort_fails_the_room_everywhere_with_its_cause_and_no_other_room(by: str, steps: int) -> None:
    """And all of the ring is free again."""
    world = under_way(steps)
    world.feed(by, ev.AbortRoom(7, "enough"))
    world.settle(ticks=130)
    aborted, other = world.rooms["decode-0", 7, 1000], world.rooms["decode-0", 8, 1001]
    assert other.state is RoomState.SUCCESS
    if aborted.state is RoomState.FAILED:
        causes = [aborted.failure, *(world.sent_failures[name, 7] for name in world.prefill_names)]
        assert {cause["code"] for cause in causes} == {"ABORTED"}
        assert {cause["text"].rpartition(": ")[2] for cause in causes} == {"enough"}
    world.check_empty()


def test_the_first_cause_wins_on_every_rank() -> None:
    world = under_way(30)
    world.feed("prefill-1", ev.AbortRoom(7, "the first"))
    world.flush()
    for name in ("prefill-0", "decode-0", "prefill-1"):
        world.feed(name, ev.AbortRoom(7, "a later one"))
    world.settle()
    room = world.rooms["decode-0", 7, 1000]
    assert room.failure["text"] == "the first"
    assert room.failure["rank"] == "prefill-1"
    assert [world.sent_failures[name, 7]["text"] for name in world.prefill_names] == ["the first"] * 2


def test_a_part_that_failed_with_bytes_in_flight_holds_its_room_until_the_engine_lets_go() -> None:
    world = connected(choose=direct)
    room = world.receive(7, 2)
    world.send(7, 2)
    while not world.flying:
        world.happen(world.pool.pop(world.ready()[0]))
    order = world.flying[0].order
    failed = ev.PartFailed("decode-0", 7, 1000, order.kind, order.key, "KV_TRANSPORT", "the wire broke", True)
    world.feed("prefill-0", failed)
    run_until(world, "complete")
    assert world.sent["prefill-0", 7] is RoomState.FAILED
    assert room.failure["text"] == "the wire broke"
    assert not room.released
    assert ("prefill-0", 7) not in world.sent_released
    world.settle()
    assert room.released


def test_a_page_count_that_differs_fails_that_room_alone_and_names_both_counts() -> None:
    world = connected()
    for room, pages in [(7, 5), (8, 4)]:
        world.receive(room, 4)
        world.send(room, pages)
    world.settle()
    wrong, right = world.rooms["decode-0", 7, 1000], world.rooms["decode-0", 8, 1001]
    assert right.state is RoomState.SUCCESS
    assert wrong.failure["code"] == "KV_PLAN_MISMATCH"
    assert "this side computed 5 pages, decode-0 expects 4" in wrong.failure["text"]
    assert not wrong.segments
    world.check_empty()


def test_too_many_pages_are_noticed_before_a_cell_of_another_length_is_sent() -> None:
    world = connected(chunk_pages=4, choose=direct)
    room = world.receive(7, 6)
    world.flush()
    world.feed("prefill-0", ev.SendRoom(7))
    world.feed("prefill-0", ev.SendPages(7, np.arange(8, dtype=np.int32), False, 1))
    assert not [item for item in world.pool if item.kind == "begin"]
    world.flush()
    assert "computed 8 pages, decode-0 expects 6" in room.failure["text"]


def test_a_decode_rank_that_expects_an_aux_row_learns_that_there_is_none() -> None:
    world = connected()
    room = world.receive(7, 2, aux=3)
    world.send(7, 2, aux=-1)
    world.settle()
    assert room.failure["code"] == "KV_PLAN_MISMATCH"
    assert "expects an aux row" in room.failure["text"]


def test_our_own_wrong_page_list_fails_that_room_here() -> None:
    world = connected()
    room = world.receive(7, 5, prefix=5, aux=-1)
    wrong = world.receive(8, 0, aux=-1, extra=3)
    assert "3 pages after a prefix of 0, not 0" in wrong.failure["text"]
    assert wrong.released
    world.flush()
    assert room.state is RoomState.SUCCESS


class TestDeadlines:
    """Silence is not success: every wait has a deadline that names what was waited for."""

    def failure(self, world: World, limit_ns: int) -> str:
        end = world.now_ns + limit_ns + 5 * SECOND
        while world.now_ns < end:
            world.tick(SECOND)
            world.flush()
        (room,) = world.rooms.values()
        assert room.released
        return f"{room.failure['code']} {room.failure['text']}"

    def test_an_instance_that_is_not_complete(self) -> None:
        world = World(ParallelConfig(tp=2), ParallelConfig())
        world.paused.add("prefill-1")
        world.receive(7, 2)
        text = self.failure(world, TIMING.bootstrap_ns)
        assert "KV_ROOM_STUCK_BOOTSTRAP" in text
        assert "not accepted by prefill-1" in text

    def test_an_engine_that_never_computes(self) -> None:
        world = connected()
        world.receive(7, 2)
        text = self.failure(world, TIMING.waiting_ns)
        assert "KV_ROOM_STUCK" in text
        assert "chunk 0 layers 0-1 of prefill-0 did not arrive" in text or "gave 0 pages" in text

    def test_a_decode_rank_that_never_opens(self) -> None:
        world = connected(ParallelConfig(), ParallelConfig(tp=2))
        world.receive(7, 2)
        world.send(7, 2)
        while not world.sent["prefill-0", 7].finished:
            world.flush()
            world.tick(SECOND)
        assert TIMING.bootstrap_ns < world.now_ns < TIMING.bootstrap_ns + 5 * SECOND
        failure = world.sent_failures["prefill-0", 7]
        assert failure["code"] == "KV_ROOM_STUCK_BOOTSTRAP"
        assert "1 of 2 decode ranks opened it" in failure["text"]

    def test_an_engine_that_does_not_finish_one_of_two_ranks(self) -> None:
        """Not "no RoomDone": the decode side cannot say so before the aux row is there."""
        world = connected(ParallelConfig(tp=2))
        world.receive(7, 2)
        world.flush()
        for number, name in enumerate(world.prefill_names):
            world.feed(name, ev.SendRoom(7))
            world.source.update({(name, page): (7, page) for page in range(2)})
            world.feed(name, ev.SendPages(7, np.arange(2, dtype=np.int32), True, 1))
            world.flush()
            world.tick((1 - number) * SECOND)
        world.settle(ticks=130)
        failure = world.sent_failures["prefill-0", 7]
        assert failure["rank"] == "prefill-0"
        assert failure["text"].endswith("finish() was not called")

    def test_a_room_that_moves_on_meets_no_deadline(self) -> None:
        world = connected(chunk_pages=1, ring=64)
        room = world.receive(7, 5)
        world.flush()
        world.feed("prefill-0", ev.SendRoom(7))
        for page in range(5):
            world.source["prefill-0", page] = (7, page)
            world.feed("prefill-0", ev.SendPages(7, np.array([page], np.int32), page == 4, 1))
            for _ in range(TIMING.waiting_ns // SECOND * 2 // 3):
                world.flush()
                world.tick(SECOND)
        world.feed("prefill-0", ev.Finish(7, 1, 1))
        world.flush()
        assert room.state is RoomState.SUCCESS


class FailingDevice(World):  # type: ignore[misc]
    """Its decode rank's device fails the copy of what landed."""

    def _scatter(self, name: str, action: ev.Scatter) -> None:
        self.feed(name, ev.ScatterFailed(action.serial, "an illegal address"))


def test_a_part_that_cannot_be_copied_to_its_pages_fails_its_room_by_name() -> None:
    world = FailingDevice(ParallelConfig(tp=2), ParallelConfig(), choose=staged, ring=64)
    world.connect()
    room = world.receive(7, 4)
    world.send(7, 4)
    world.settle()
    assert room.state is RoomState.FAILED
    assert (room.failure["code"], room.failure["rank"]) == ("KV_DEVICE", "decode-0")
    assert "landed, but could not be copied to its pages: an illegal address" in room.failure["text"]
    assert room.released
    assert world.sent["prefill-0", 7] is RoomState.FAILED
    world.check_empty()
