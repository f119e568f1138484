"""What an engine has computed of one room, layer by layer: which pages of the prompt are there, and what may be sent.

A plain forward computes the next pages in all layers at once, a pipelined one in one layer group after the other. The
layers that stand at the same page are kept together, so a plain room is one span however many layers there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk, sendable_pages
from kvctl_agent.protocol.events import Pages


class SendableChunk(NamedTuple):
    """Layers [lo, hi) may now be sent up to page `new`; they could be up to page `old` before."""

    lo: int
    hi: int
    old: int
    new: int


class ComputedPages:
    """The pages of one room on a prefill rank.

    Attributes:
        total: pages of the prompt; None until the last ones were given.
        forwards: how often new pages were computed, however many layer groups they came in.
    """

    __slots__ = ("_chunk_pages", "_given", "_pages", "_spans", "forwards", "total")

    def __init__(self, layers: range, chunk_pages: int) -> None:
        self._chunk_pages = chunk_pages
        self._spans: list[tuple[int, int, int]] = [(layers.start, layers.stop, 0)]  # lo, hi, pages computed
        self._pages: list[Pages] = []
        self._given = 0
        self.total: int | None = None
        self.forwards = 0

    @property
    def given(self) -> int:
        """Pages that at least one layer has."""
        return self._given

    @property
    def complete(self) -> bool:
        """Every layer of every page is computed."""
        return len(self._spans) == 1 and self._spans[0][2] == self.total

    def take(self, layers: tuple[int, int] | None, pages: Pages, last: bool) -> list[SendableChunk]:
        """The next pages of these layers (None: of all) are computed; what may be sent now.

        Raises:
            LayoutError: they do not follow what was given before; nothing has changed.
        """
        if layers is None and len(self._spans) == 1:  # every plain room: what follows, without the other layers
            lo, hi, first = self._spans[0]
            end = first + len(pages)
            self._check_end(end, last)
            self._keep(first, pages)
            if last:
                self.total = end
            self._spans = [(lo, hi, end)]
            return [SendableChunk(lo, hi, self._full(first, last=False), self._full(end, last=end == self.total))]
        lo, hi = layers or (self._spans[0][0], self._spans[-1][1])
        met = [span for span in self._spans if span[0] < hi and span[1] > lo]
        starts = {span[2] for span in met}
        if not met or lo < self._spans[0][0] or hi > self._spans[-1][1] or lo >= hi:
            own = layer_range(self._spans[0][0], self._spans[-1][1])
            raise LayoutError(f"layers {layer_range(lo, hi)} are not among this rank's {own}")
        if len(starts) != 1:
            at = ", ".join(f"{layer_range(span[0], span[1])} at page {span[2]}" for span in met)
            raise LayoutError(f"layers {layer_range(lo, hi)} do not stand at one page: {at}")
        (first,) = starts
        end = first + len(pages)
        self._check_end(end, last)
        self._keep(first, pages)
        others = self._outside(lo, hi)
        ended = [span for span in others if last and self.total is None and span[2] == end]
        if last:
            self.total = end
        self._spans = _merged([*others, (lo, hi, end)])
        steps = [SendableChunk(lo, hi, self._full(first, last=False), self._full(end, last=end == self.total))]
        # Layers that had come this far did not know that it was the end, and held their tail back.
        return steps + [SendableChunk(start, stop, self._full(end, last=False), end) for start, stop, _ in ended]

    def steps(self) -> list[SendableChunk]:
        """Everything that may be sent so far."""
        found = [SendableChunk(lo, hi, 0, self._full(end, last=end == self.total)) for lo, hi, end in self._spans]
        return [step for step in found if step.new]

    def ready(self, lo: int, hi: int, page: int) -> bool:
        """Whether layers [lo, hi) may be sent up to `page`."""
        return all(
            self._full(end, last=end == self.total) >= page
            for first, stop, end in self._spans
            if first < hi and stop > lo
        )

    def source(self, cell: Chunk) -> Pages:
        """Our pages of one cell."""
        if len(self._pages) > 1:
            self._pages = [np.concatenate(self._pages)]
        return self._pages[0][cell.first : cell.first + cell.count]

    def behind(self) -> str:
        """Which layers lack which pages, for the text of a failure; how many all have where none is behind."""
        most = self._given if self.total is None else self.total
        short = [
            f"layers {layer_range(lo, hi)} were given {end} of {most} pages"
            for lo, hi, end in self._spans
            if end < most
        ]
        return ", ".join(short) or f"all layers have {most}, and more were to come"

    def _check_end(self, end: int, last: bool) -> None:
        if self.total is not None and (end > self.total or (last and end != self.total)):
            raise LayoutError(f"pages up to {end} after the last ones, which ended at {self.total}")
        if last and end < self._given:
            raise LayoutError(f"the last pages end at {end}, but other layers were given {self._given}")

    def _keep(self, first: int, pages: Pages) -> None:
        if first == self._given:
            self._pages.append(pages)
            self._given += len(pages)
            self.forwards += bool(len(pages))
            return
        known = self.source(Chunk(0, first, len(pages)))
        if len(known) != len(pages) or not np.array_equal(known, pages):
            raise LayoutError(f"pages {first}-{first + len(pages)} are others than those given for other layers")

    def _outside(self, lo: int, hi: int) -> list[tuple[int, int, int]]:
        spans: list[tuple[int, int, int]] = []
        for first, stop, end in self._spans:
            if first < lo:
                spans.append((first, min(stop, lo), end))
            if stop > hi:
                spans.append((max(first, hi), stop, end))
        return spans

    def _full(self, end: int, *, last: bool) -> int:
        return sendable_pages(end, last, self._chunk_pages)


def _merged(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    spans.sort()
    merged = [spans[0]]
    for lo, hi, end in spans[1:]:
        if merged[-1][2] == end:
            merged[-1] = (merged[-1][0], hi, end)
        else:
            merged.append((lo, hi, end))
    return merged
