"""Context-parallel and pipeline-parallel instances: which ranks owe parts, and which wait."""

from __future__ import annotations

import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.protocol import events as ev
from tests.support.protocol.simulation import World, direct

DEEP = ModelShape(4, 2, 32, 32, 2)


def cells(world: World, rank: int, reader: int = 0, room: int = 7) -> list[tuple[int, ...]]:
    """(chunk, first page, pages) that a rank owes."""
    transfer = next(
        transfer for transfer in world.p(rank).rooms[room].transfers.values() if transfer.peer == f"decode-{reader}"
    )
    return [tuple(cell)[:3] for cell in transfer.tables[0].chunks]


def opened(
    prefill: ParallelConfig,
    decode: ParallelConfig,
    pages: int = 5,
    *,
    prefix: int = 0,
    room: int = 7,
    **options: object,
) -> World:
    world = World(prefill, decode, shape=DEEP, choose=direct, **options)  # type: ignore[arg-type]
    world.connect()
    for reader in range(decode.size):
        world.receive(room, pages, reader=reader, prefix=prefix)
    world.flush()
    return world


class TestContextParallel:
    @pytest.mark.parametrize(
        ("mode", "prefix", "owed"),
        [
            ("rank0", 0, [[(0, 0, 2), (1, 2, 2), (2, 4, 1)], []]),
            ("rank0", 3, [[(1, 3, 1), (2, 4, 1)], []]),
            ("all", 0, [[(0, 0, 2), (1, 2, 1)], [(1, 3, 1), (2, 4, 1)]]),
            ("all", 3, [[(1, 3, 1)], [(2, 4, 1)]]),
            ("all", 5, [[], []]),
            ("all-chunk", 0, [[(0, 0, 1), (1, 2, 1), (2, 4, 1)], [(0, 1, 1), (1, 3, 1)]]),
            ("all-chunk", 1, [[(0, 1, 1), (1, 2, 1), (2, 4, 1)], [(1, 3, 1)]]),
        ],
    )
    def test_each_mode_has_its_own_cells(self, mode: str, prefix: int, owed: list[list[tuple[int, ...]]]) -> None:
        world = opened(ParallelConfig(cp=2), ParallelConfig(), cp_mode=mode, prefix=prefix)
        assert [cells(world, rank) for rank in (0, 1)] == owed
        world.send(7, 5)
        world.settle()
        assert world.rooms["decode-0", 7, 1000].state is RoomState.SUCCESS
        world.check_empty()

    def test_by_hash_one_rank_sends_all_of_a_room_and_rooms_differ(self) -> None:
        senders = set()
        for room in range(12):
            world = opened(ParallelConfig(cp=2), ParallelConfig(), cp_mode="room-hash", room=room)
            owed = [bool(world.p(rank).rooms[room].transfers["decode-0"].planned) for rank in (0, 1)]
            assert sorted(owed) == [False, True]
            senders.add(owed.index(True))
        assert senders == {0, 1}

    @pytest.mark.parametrize("mode", ["rank0", "all", "all-chunk", "room-hash"])
    def test_a_rank_that_owes_nothing_opens_reports_and_closes(self, mode: str) -> None:
        """What is owed is asked of the plan, whatever the mode."""
        world = opened(ParallelConfig(cp=2), ParallelConfig(), pages=1, cp_mode=mode)
        assert world.rooms["decode-0", 7, 1000].state is RoomState.WAITING_FOR_INPUT
        world.send(7, 1)
        world.settle(ticks=1)
        assert world.sent == {("prefill-0", 7): RoomState.SUCCESS, ("prefill-1", 7): RoomState.SUCCESS}
        assert sum(world.paths.values()) == 1
        world.check_empty()

    def test_the_aux_row_has_one_writer_even_where_another_rank_sends_the_pages(self) -> None:
        room = next(r for r in range(12) if not self.first_sends(r))
        world = opened(ParallelConfig(cp=2), ParallelConfig(), cp_mode="room-hash", room=room)
        assert [bool(world.p(rank).rooms[room].transfers["decode-0"].finals) for rank in (0, 1)] == [True, False]
        world.send(room, 5)
        world.settle()
        assert world.rooms["decode-0", room, 1000].aux_written == 1

    def first_sends(self, room: int) -> bool:
        world = opened(ParallelConfig(cp=2), ParallelConfig(), cp_mode="room-hash", room=room)
        return bool(world.p(0).rooms[room].transfers["decode-0"].planned)


class TestPipelineParallel:
    def test_uneven_stages_on_both_sides_meet_layer_by_layer(self) -> None:
        world = opened(ParallelConfig(pp=2, stages=(1, 3)), ParallelConfig(pp=2, stages=(2, 2)))
        owed = {
            (rank, peer): [(share.layer_lo, share.layer_hi) for share in transfer.shares]
            for rank in (0, 1)
            for peer, transfer in world.p(rank).rooms[7].transfers.items()
        }
        assert owed == {
            (0, "decode-0"): [(0, 1)],
            (1, "decode-0"): [(1, 2)],
            (1, "decode-1"): [(2, 4)],
        }
        world.send(7, 5)
        world.settle()
        assert {room.state for room in world.rooms.values()} == {RoomState.SUCCESS}

    def test_the_last_stage_writes_the_aux_row(self) -> None:
        world = opened(ParallelConfig(pp=2), ParallelConfig(pp=2))
        assert [len(transfer.finals) for transfer in world.p(0).rooms[7].transfers.values()] == [0]
        assert [len(transfer.finals) for transfer in world.p(1).rooms[7].transfers.values()] == [1, 1]

    def compute(self, world: World, rank: int, first: int, end: int, *, last: bool) -> None:
        name = world.prefill_names[rank]
        for page in range(first, end):
            world.source[name, page] = (7, page)
        world.feed(name, ev.SendPages(7, np.arange(first, end, dtype=np.int32), last, 1))

    def test_a_stage_sends_as_soon_as_its_forward_is_done_unless_it_is_told_to_wait(self) -> None:
        for early in (True, False):
            world = opened(ParallelConfig(pp=2), ParallelConfig(), 4, early_send=early)
            for name in world.prefill_names:
                world.feed(name, ev.SendRoom(7))
                world.feed(name, ev.Prefetch(7))
            self.compute(world, 0, 0, 2, last=False)
            self.compute(world, 1, 0, 2, last=False)
            begun = {item.by for item in world.pool if item.kind == "begin"}
            assert begun == ({"prefill-0", "prefill-1"} if early else {"prefill-1"}), "the last one never waits"
            self.compute(world, 0, 2, 4, last=True)
            self.compute(world, 1, 2, 4, last=True)
            world.flush()
            for name in world.prefill_names:
                world.feed(name, ev.Finish(7, 1, 1))
            world.settle(ticks=1)
            assert world.rooms["decode-0", 7, 1000].state is RoomState.SUCCESS

    def test_what_a_waiting_stage_was_given_wrongly_is_told_when_it_sends(self) -> None:
        world = opened(ParallelConfig(pp=2), ParallelConfig(), 4, early_send=False)
        world.feed("prefill-0", ev.SendRoom(7))
        self.compute(world, 0, 0, 3, last=True)
        assert world.sent["prefill-0", 7] is not RoomState.FAILED
        world.feed("prefill-0", ev.Finish(7, 1, 1))
        assert "computed 3 pages, decode-0 expects 4" in world.sent_failures["prefill-0", 7]["text"]
        world.settle()
        world.check_empty()

    def test_a_stage_that_waits_for_a_long_forward_meets_no_deadline(self) -> None:
        world = opened(ParallelConfig(pp=2), ParallelConfig(), 4, early_send=False, chunk_pages=1)
        for name in world.prefill_names:
            world.feed(name, ev.SendRoom(7))
        for page in range(4):
            for rank in (0, 1):
                self.compute(world, rank, page, page + 1, last=page == 3)
            for _ in range(world.timing.waiting_ns // world.timing.resend_ns * 2 // 3):
                world.flush()
                world.tick(world.timing.resend_ns)
        for name in world.prefill_names:
            world.feed(name, ev.Finish(7, 1, 1))
        world.settle(ticks=1)
        assert world.rooms["decode-0", 7, 1000].state is RoomState.SUCCESS

    def test_a_waiting_stage_that_is_never_finished_says_what_it_waits_for(self) -> None:
        world = opened(ParallelConfig(pp=2), ParallelConfig(), 4, early_send=False)
        for name in world.prefill_names:
            world.feed(name, ev.SendRoom(7))
        self.compute(world, 0, 0, 4, last=True)
        world.flush()
        world.tick(world.timing.resend_ns)
        self.compute(world, 1, 0, 4, last=True)
        world.settle(ticks=130)
        failure = world.sent_failures["prefill-1", 7]
        assert failure["rank"] == "prefill-0"
        assert "finish() was not called" in failure["text"]
        assert "pp_early_send is off" in failure["text"]
