"""Computed pages, compared with a model that counts the pages of each layer."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk, grid
from kvctl_agent.protocol.prefill.send_room import ComputedPages, SendableChunk

LAYERS = range(3, 8)
PROMPT = np.arange(100, 140, dtype=np.int32)


class Model:
    """One count of pages for each layer, and nothing clever."""

    def __init__(self, chunk_pages: int) -> None:
        self.chunk_pages = chunk_pages
        self.counts = dict.fromkeys(LAYERS, 0)
        self.pages: list[int] = []
        self.total: int | None = None

    def take(self, lo: int, hi: int, pages: list[int], last: bool) -> bool:
        """Whether these pages can follow; only then they do."""
        layers = range(lo, hi)
        if not layers or any(layer not in self.counts for layer in layers):
            return False
        starts = {self.counts[layer] for layer in layers}
        if len(starts) > 1:
            return False
        (first,) = starts
        end = first + len(pages)
        known = self.pages[first:end]
        if first < len(self.pages) and known != pages:
            return False
        if self.total is not None and (end > self.total or (last and end < self.total)):
            return False
        if last and end < len(self.pages):
            return False
        self.pages = self.pages[:first] + pages if end > len(self.pages) else self.pages
        self.counts |= dict.fromkeys(layers, end)
        self.total = end if last else self.total
        return True

    def sendable(self, layer: int) -> int:
        count = self.counts[layer]
        return count if count == self.total else count - count % self.chunk_pages


calls = st.lists(
    st.tuples(
        st.one_of(st.none(), st.tuples(st.integers(2, 8), st.integers(2, 9))),
        st.integers(0, 5),
        st.sampled_from([False, False, False, True]),
        st.sampled_from([False] * 9 + [True]),
    ),
    max_size=25,
)


def state_of(computed: ComputedPages) -> tuple[object, ...]:
    return computed.given, computed.total, computed.complete, computed.sendable(), computed.describe_missing()


@given(calls, st.integers(1, 4))
def test_it_says_what_a_count_for_each_layer_says(
    calls: list[tuple[tuple[int, int] | None, int, bool, bool]], chunk_pages: int
) -> None:
    computed, model = ComputedPages(LAYERS, chunk_pages), Model(chunk_pages)
    told = dict.fromkeys(LAYERS, 0)
    for layers, count, last, wrong in calls:
        lo, hi = layers or (LAYERS.start, LAYERS.stop)
        first = model.counts.get(lo, 0)
        pages = PROMPT[first : first + count] + int(wrong)
        before = state_of(computed)
        if not model.take(lo, hi, pages.tolist(), last):
            with pytest.raises(LayoutError):
                computed.take(layers, pages, last)
            assert state_of(computed) == before
            continue
        for step in computed.take(layers, pages, last):
            for layer in range(step.lo, step.hi):
                assert step.old <= told[layer], "nothing is skipped"
                told[layer] = max(told[layer], step.new)
        wanted = {layer: model.sendable(layer) for layer in LAYERS}
        assert told == wanted
        assert {layer: s.new for s in computed.sendable() for layer in range(s.lo, s.hi)} == {
            layer: page for layer, page in wanted.items() if page
        }
        assert (computed.given, computed.total) == (len(model.pages), model.total)
        assert computed.complete == (set(model.counts.values()) == {model.total})
        for page in range(len(model.pages) + 1):
            assert computed.ready(4, 6, page) == (min(wanted[4], wanted[5]) >= page)
        assert not model.pages or computed.source(Chunk(0, 0, len(model.pages)), 1).tolist() == model.pages


def test_layers_that_stand_at_one_page_are_one_span() -> None:
    computed = ComputedPages(LAYERS, 1)
    for layer in LAYERS:
        computed.take((layer, layer + 1), PROMPT[:4], last=False)
    assert computed.sendable() == [SendableChunk(3, 8, 0, 4)]
    assert computed.describe_missing() == "all layers have 4, and none with last=True"
    computed.take((3, 5), PROMPT[4:6], last=True)
    assert computed.describe_missing() == "layers 5-7 were given 4 of 6 pages"


def test_a_tail_rides_with_what_follows() -> None:
    computed = ComputedPages(LAYERS, 4)
    assert computed.take(None, PROMPT[:6], last=False) == [SendableChunk(3, 8, 0, 4)]
    assert computed.take(None, PROMPT[6:7], last=True) == [SendableChunk(3, 8, 4, 7)]


def test_one_group_that_knows_the_end_tells_it_for_those_before() -> None:
    """Else the tail of the first group would be held back for ever."""
    computed = ComputedPages(LAYERS, 4)
    assert computed.take((3, 5), PROMPT[:6], last=False) == [SendableChunk(3, 5, 0, 4)]
    assert computed.take((5, 8), PROMPT[:6], last=True) == [SendableChunk(5, 8, 0, 6), SendableChunk(3, 5, 4, 6)]
    assert computed.complete


@pytest.mark.parametrize(
    ("layers", "pages", "last", "text"),
    [
        ((3, 8), PROMPT[:1], False, "layers 3-7 do not stand at one page: 3-4 at page 4, 5-7 at page 0"),
        ((5, 8), PROMPT[1:5], False, "pages 0-4 are others than those given for other layers"),
        ((5, 8), PROMPT[:2], True, "the last pages end at 2, but other layers were given 4"),
        ((2, 4), PROMPT[:2], False, "layers 2-3 are not among this rank's 3-7"),
        ((7, 9), PROMPT[:2], False, "layers 7-8 are not among this rank's 3-7"),
        ((5, 5), PROMPT[:2], False, "layers [5, 5) are not among this rank's 3-7"),
    ],
)
def test_what_does_not_follow_is_refused_in_words(
    layers: tuple[int, int], pages: np.ndarray, last: bool, text: str
) -> None:
    computed = ComputedPages(LAYERS, 2)
    computed.take((3, 5), PROMPT[:4], last=False)
    with pytest.raises(LayoutError, match=re.escape(text)):
        computed.take(layers, pages, last)


def test_nothing_follows_the_last_pages() -> None:
    computed = ComputedPages(LAYERS, 2)
    computed.take((3, 5), PROMPT[:4], last=True)
    with pytest.raises(LayoutError, match="pages up to 6 after the last ones, which ended at 4"):
        computed.take((5, 8), PROMPT[:6], last=False)
    with pytest.raises(LayoutError, match="pages up to 3 after the last ones, which ended at 4"):
        computed.take((5, 8), PROMPT[:3], last=True)


@given(sends=st.lists(st.integers(0, 40), min_size=1, max_size=12), data=st.data(), chunk_pages=st.integers(1, 50))
def test_for_any_split_of_a_prompt_each_cell_is_sent_whole_and_as_early_as_possible(
    sends: list[int], data: st.DataObject, chunk_pages: int
) -> None:
    total = sum(sends)
    cells = grid(total, data.draw(st.integers(0, total)), chunk_pages)
    computed = ComputedPages(range(1), chunk_pages)
    fed = sent = 0
    for number, count in enumerate(sends):
        pages = np.arange(fed, fed + count, dtype=np.int32)
        fed += count
        (chunk,) = computed.take(None, pages, number == len(sends) - 1)
        # Only computed pages are sent, none is taken back, and no whole cell is held back.
        assert sent <= chunk.new <= fed
        assert all(cell.first + cell.count <= chunk.new or cell.first >= chunk.new for cell in cells)
        assert all(cell.first + cell.count <= chunk.new for cell in cells if (cell.index + 1) * chunk_pages <= fed)
        sent = chunk.new
    assert sent == total
