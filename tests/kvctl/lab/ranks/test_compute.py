"""Simulated compute: one chunk at a time, stages one after the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.ranks.compute import PipelineClock


def test_one_rank_computes_one_room_after_the_other():
    compute = PipelineClock([4], 0, layer_ns=10)
    assert compute.forward(asked_ns=100, chunks=2) == [100, 140]
    assert compute.forward(asked_ns=110, chunks=1) == [180]
    assert compute.forward(asked_ns=500, chunks=1) == [500]


def test_a_later_stage_takes_a_chunk_up_when_the_one_before_is_done_with_it():
    first, second = (PipelineClock([3, 1], stage, layer_ns=10) for stage in (0, 1))
    assert first.forward(0, chunks=3) == [0, 30, 60]
    assert second.forward(0, chunks=3) == [30, 60, 90]
    # The slower of two stages sets the pace, wherever it stands.
    assert PipelineClock([1, 3], 1, layer_ns=10).forward(0, chunks=3) == [10, 40, 70]


@given(
    layers=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    rooms=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 4)), max_size=5),
)
def test_every_stage_begins_no_chunk_before_the_stage_before_is_done(layers: list[int], rooms: list[tuple[int, int]]):
    stages = [PipelineClock(layers, stage, layer_ns=7) for stage in range(len(layers))]
    for asked, chunks in sorted(rooms):
        before = [asked] * chunks
        for stage, count in zip(stages, layers, strict=True):
            begins = stage.forward(asked, chunks)
            assert all(begin >= done for begin, done in zip(begins, before, strict=True))
            before = [begin + 7 * count for begin in begins]
