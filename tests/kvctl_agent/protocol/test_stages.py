"""Context-parallel and pipeline-parallel instances: which ranks owe parts, and which wait."""

from __future__ import annotations

import numpy as np

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.protocol import events as ev
from tests.support.protocol.simulation import World, direct

DEEP = ModelShape(4, 2, 32, 32, 2)


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


class TestPipelineParallel:
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
