"""Index of the pool rows of a part, checked once and used for every layer and plane by gathers and scatters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvctl_agent.device.base import PageIds
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import Indices
from kvctl_agent.memory.head_slice import HeadSlice
from kvctl_agent.memory.segment import SegmentMemory

# Page runs of at least this size are copied as runs. For shorter runs, a Python call per run costs more than it saves.
_RUN_BYTES = 128 << 10

_ZERO = np.zeros(1, np.int64)


class RowIndex:
    """The pages (for state: items) of one part and its head slice in one segment.

    The bounds of the pages are checked here, because the copies either clip indices or do not check them. A gather may
    list a page more than once. If a scatter does, it is undefined which copy remains. Arrays that only host copies need
    are computed on first use.

    Attributes:
        memory: The segment's memory.
        head, heads: Local heads [head, head + heads).
        raw_pages: The pages in the part's order, as the caller passed them; the caller must not modify them.
    """

    def __init__(self, memory: SegmentMemory, pages: npt.ArrayLike, head: int, heads: int) -> None:
        """Check the pages and heads.

        Args:
            memory: The segment's memory.
            pages: Page (for state: item) indices, a non-empty list of integers.
            head: First local head.
            heads: Number of heads.

        Raises:
            MemoryLayoutError: a page or head is outside the segment's memory; the text names it.
        """
        raw_pages = np.asarray(pages)
        if raw_pages.ndim != 1 or not raw_pages.size or raw_pages.dtype.kind not in "iu":
            raise MemoryLayoutError(
                f"pages: {raw_pages.dtype} {raw_pages.shape}, expected a non-empty list of integers"
            )
        # For page lists of the length of a prompt, `min` and `max` take four times as long.
        low, high = raw_pages.item(raw_pages.argmin()), raw_pages.item(raw_pages.argmax())
        if low < 0 or high >= memory.num_slots:
            noun = "item" if memory.shard.segment.state else "page"
            raise MemoryLayoutError(
                f"{memory.name}: {noun} {low if low < 0 else high} is outside the pool of {memory.num_slots} {noun}s; "
                "the indices belong to another pool or are stale"
            )
        memory.check_heads(head, heads)
        self.memory = memory
        self.head, self.heads = head, heads
        self.raw_pages = raw_pages
        self._units: dict[int, Indices] = {}

    def __len__(self) -> int:
        """Number of pages."""
        return len(self.raw_pages)

    @property
    def page_ids(self) -> PageIds:
        """The pages, int32 `[num_pages]`, for kernel launches."""
        return self.raw_pages.astype(np.int32, copy=False)

    @cached_property
    def pages(self) -> Indices:
        """The pages, int64 `[num_pages]`, for host copies."""
        return np.ascontiguousarray(self.raw_pages, dtype=np.int64)

    @cached_property
    def slice(self) -> HeadSlice:
        """Views of the head slice in every layer, in host memory."""
        return self.memory.head_slice(self.head, self.heads)

    @property
    def run_count(self) -> int:
        """Number of runs of consecutive ascending pages."""
        return len(self._run_starts)

    @cached_property
    def as_runs(self) -> tuple[bool, ...]:
        """For each plane, whether to copy page runs instead of single pages; faster if the runs are long."""
        return tuple(
            self.run_count == 1 or len(self.pages) * page_bytes >= self.run_count * _RUN_BYTES
            for page_bytes in self.slice.page_bytes
        )

    @cached_property
    def _run_starts(self) -> Indices:
        steps = self.pages[1:] - self.pages[:-1]
        return np.concatenate((_ZERO, np.flatnonzero(steps != 1) + 1))

    def takes(self, plane: int, page_lo: int, page_hi: int) -> Indices:
        """Return the indices into the plane's `slice.takes` for positions [page_lo, page_hi), in staging order."""
        if self.slice.whole:
            return self.pages[page_lo:page_hi]
        rows = self.slice.rows[plane]
        units = self._units.get(rows)
        if units is None:
            row_indices = self.pages[:, None] * rows + np.arange(rows, dtype=np.int64)
            first = row_indices.reshape(-1, 1) * self.slice.units_per_row
            units = self._units[rows] = (first + np.arange(self.slice.heads // self.slice.unit_heads)).reshape(-1)
        per_page = len(units) // len(self.pages)
        return units[page_lo * per_page : page_hi * per_page]

    def runs(self, page_lo: int, page_hi: int) -> Iterator[tuple[int, int, int]]:
        """Split positions [page_lo, page_hi) into runs (first page, lo, hi), with lo and hi relative to `page_lo`."""
        if len(self._run_starts) == 1:
            yield int(self.pages[page_lo]), 0, page_hi - page_lo
            return
        inside = self._run_starts[slice(*np.searchsorted(self._run_starts, (page_lo + 1, page_hi)))]
        for lo, hi in pairwise([page_lo, *inside.tolist(), page_hi]):
            yield int(self.pages[lo]), lo - page_lo, hi - page_lo
