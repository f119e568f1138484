"""Computed pages, compared with a model that counts the pages of each layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk
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


def test_nothing_follows_the_last_pages() -> None:
    computed = ComputedPages(LAYERS, 2)
    computed.take((3, 5), PROMPT[:4], last=True)
    with pytest.raises(LayoutError, match="pages up to 6 after the last ones, which ended at 4"):
        computed.take((5, 8), PROMPT[:6], last=False)
    with pytest.raises(LayoutError, match="pages up to 3 after the last ones, which ended at 4"):
        computed.take((5, 8), PROMPT[:3], last=True)
