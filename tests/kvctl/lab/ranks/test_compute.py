"""Simulated compute: one chunk at a time, stages one after the other; what is computed is passed to the agent once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.ranks.compute import Forward, PipelineClock
from kvctl.lab.ranks.messages import Room
from tests.support.synthetic_rank import SHAPE, start_command


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


class Passed:
    """A `Send` that counts how often each (layer, table, page) was passed, and how often the room was finished."""

    def __init__(self, layers: range) -> None:
        self._layers = layers
        self.passed: list[tuple[int, int, int]] = []
        self.finished: list[tuple[Any, ...]] = []

    def prefetch(self, groups: Any, tokens: int) -> None:
        assert not self.passed

    def layers(self, group: range, pages: Any, last: bool = False, group_pages: Any = ()) -> None:
        assert not self.finished
        tables = enumerate([pages, *group_pages])
        self.passed += [(layer, table, page) for table, some in tables for page in some for layer in group]

    def pages(self, pages: Any, group_pages: Any = ()) -> None:
        self.layers(self._layers, pages, group_pages=group_pages)

    def finish(self, aux: int, states: Any, pages: Any = None, group_pages: Any = ()) -> None:
        if pages is not None:
            self.pages(pages, group_pages)
        self.finished.append((aux, states))


@given(
    tokens=st.integers(1, 40),
    splits=st.lists(st.sampled_from([(), (3,), (1, 3), (1, 2, 3)]), min_size=5, max_size=5),
    with_groups=st.booleans(),
)
def test_every_page_is_passed_once_in_every_layer(tokens: int, splits: list[tuple[int, ...]], with_groups: bool):
    near: Any = {
        "name": "near",
        "layers": [0],
        "page_size": 2,
        "window": 0,
        "kv_heads": 1,
        "head_dim": 8,
        "v_head_dim": 8,
    }
    shape: Any = {**SHAPE, "groups": [near] if with_groups else []}
    start = start_command(shape, role="prefill", instance=0, config={"chunk_tokens": "8"})
    sizes = [start.page_size, *(each["page_size"] for each in shape["groups"])]
    tables = [np.arange(-(-tokens // size)) for size in sizes]
    content: Any = SimpleNamespace(start=start, computed=lambda _: tables, slots={7: 2}, states=lambda _: ("state",))
    chosen = iter(splits)

    def layer_groups(_: Any) -> Any:
        ends = next(chosen)
        return SimpleNamespace(groups=[range(lo, hi) for lo, hi in zip((0, *ends), ends, strict=False)])

    agent: Any = SimpleNamespace(layers=range(3), layer_groups=layer_groups)
    send: Any = Passed(agent.layers)
    room = Room(index=0, number=7, tokens=tokens, prefix_tokens=0, decode_dp=0)
    for _ in Forward(agent, content, PipelineClock([3], 0, 0)).run(room, send, 0, prefetched=False):
        pass
    assert send.finished == [(2, ("state",))]
    expected = [(layer, at, page) for at, table in enumerate(tables) for page in table for layer in range(3)]
    assert sorted(send.passed) == sorted(expected)
