"""Which rows of a pool a part touches: checked once, then reused for every layer and plane, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvctl_agent.device.base import Places
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import Indices
from kvctl_agent.memory.head_slice import HeadSlice
from kvctl_agent.memory.segment import SegmentMemory

# Page runs at least this long are copied as runs: below it, a Python call per run costs more than it saves.
_RUN_BYTES = 128 << 10

_ZERO = np.zeros(1, np.int64)


class RowIndex:
    """The pages (of a state: items) of one part and its head slice in one segment.

    Kernels index with clipping or trust, so the bounds check is here. Pages may repeat when gathering; a scatter
    with repeated pages leaves it open which copy wins. What only numpy's copies need is made when they ask for it.

    Attributes:
        memory: the segment's.
        head, heads: local heads [head, head + heads).
        given: the pages, in the part's order, as the caller had them, who must not change them.
    """

    def __init__(self, memory: SegmentMemory, pages: npt.ArrayLike, head: int, heads: int) -> None:
        """Check `pages` and local heads [head, head + heads); raises MemoryLayoutError naming what is outside."""
        given = np.asarray(pages)
        if given.ndim != 1 or not given.size or given.dtype.kind not in "iu":
            raise MemoryLayoutError(f"pages: {given.dtype} {given.shape}, expected a non-empty list of integers")
        # For the pages of a prompt, `min` and `max` would take four times as long.
        low, high = given.item(given.argmin()), given.item(given.argmax())
        if low < 0 or high >= memory.num_slots:
            what = "item" if memory.held.segment.state else "page"
            raise MemoryLayoutError(
                f"{memory.name}: {what} {low if low < 0 else high} is outside the pool of {memory.num_slots} {what}s; "
                "the indices belong to another pool, or are stale"
            )
        memory.check_heads(head, heads)
        self.memory = memory
        self.head, self.heads = head, heads
        self.given = given
        self._units: dict[int, Indices] = {}

    def __len__(self) -> int:
        """Number of pages."""
        return len(self.given)

    @property
    def places(self) -> Places:
        """The pages, as launches take them."""
        return self.given.astype(np.int32, copy=False)

    @cached_property
    def pages(self) -> Indices:
        """The pages, int64 `[num_pages]`, as numpy's copies take them."""
        return np.ascontiguousarray(self.given, dtype=np.int64)

    @cached_property
    def slice(self) -> HeadSlice:
        """The views of the head slice in every layer, in host memory."""
        return self.memory.head_slice(self.head, self.heads)

    @property
    def run_count(self) -> int:
        """Ascending runs that the pages fall into."""
        return len(self._run_starts)

    @cached_property
    def as_runs(self) -> tuple[bool, ...]:
        """For each plane, whether the pages lie mostly in long ascending runs, which copy faster as runs."""
        return tuple(
            self.run_count == 1 or len(self.pages) * page_bytes >= self.run_count * _RUN_BYTES
            for page_bytes in self.slice.page_bytes
        )

    @cached_property
    def _run_starts(self) -> Indices:
        steps = self.pages[1:] - self.pages[:-1]
        return np.concatenate((_ZERO, np.flatnonzero(steps != 1) + 1))

    def takes(self, plane: int, page_lo: int, page_hi: int) -> Indices:
        """Positions [page_lo, page_hi) as an index into that plane's `slice.takes`, in staging order."""
        if self.slice.whole:
            return self.pages[page_lo:page_hi]
        rows = self.slice.rows[plane]
        units = self._units.get(rows)
        if units is None:
            numbers = self.pages[:, None] * rows + np.arange(rows, dtype=np.int64)
            first = numbers.reshape(-1, 1) * self.slice.units_per_row
            units = self._units[rows] = (first + np.arange(self.slice.heads // self.slice.unit_heads)).reshape(-1)
        per_page = len(units) // len(self.pages)
        return units[page_lo * per_page : page_hi * per_page]

    def runs(self, page_lo: int, page_hi: int) -> Iterator[tuple[int, int, int]]:
        """Cut positions [page_lo, page_hi) into ascending runs: (first page, lo, hi), lo and hi from page_lo."""
        if len(self._run_starts) == 1:
            yield int(self.pages[page_lo]), 0, page_hi - page_lo
            return
        inside = self._run_starts[slice(*np.searchsorted(self._run_starts, (page_lo + 1, page_hi)))]
        for lo, hi in pairwise([page_lo, *inside.tolist(), page_hi]):
            yield int(self.pages[lo]), lo - page_lo, hi - page_lo
