"""Which rows of a pool a part touches: checked once, then reused for every layer, K and V, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import gcd

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import Indices
from kvctl_agent.memory.pool import KVPool

# Page runs at least this long are copied as runs: below it, a Python call per run costs more than it saves.
_RUN_BYTES = 128 << 10


class RowIndex:
    """The pages of one part and its head slice in one pool's geometry.

    Kernels index with clipping or trust, so the bounds check is here. Pages may repeat when gathering; a scatter
    with repeated pages leaves it open which copy wins.

    Attributes:
        pool: the pool the rows are in.
        pages: int64 `[num_pages]`, in the part's order.
        head, heads: the local head slice [head, head + heads).
        whole: the slice is all local heads, so a page is one row.
        as_runs: the pages lie mostly in long ascending runs, which copy faster as runs.
    """

    def __init__(self, pool: KVPool, pages: npt.ArrayLike, head: int, heads: int) -> None:
        """Check `pages` and the head slice against `pool`; raises MemoryLayoutError naming what is outside."""
        given = np.asarray(pages)
        if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
            raise MemoryLayoutError(f"pages: {given.dtype} {given.shape}, expected a non-empty list of integers")
        low, high = int(given.min()), int(given.max())
        if low < 0 or high >= pool.num_pages:
            raise MemoryLayoutError(
                f"page {low if low < 0 else high} is outside the pool of {pool.num_pages} pages; "
                "the indices belong to another pool, or are stale"
            )
        if head < 0 or heads <= 0 or head + heads > pool.heads:
            raise MemoryLayoutError(f"heads [{head}, {head + heads}) are outside the {pool.heads} heads of this rank")
        self.pool = pool
        self.pages: Indices = np.ascontiguousarray(given, dtype=np.int64)
        self.head = head
        self.heads = heads
        self.whole = heads == pool.heads
        self._run_starts = np.flatnonzero(np.diff(self.pages, prepend=self.pages[0] - 2) != 1)
        page_bytes = pool.page_size * heads * min(pool.k_dim, pool.v_dim) * pool.dtype_bytes
        runs = len(self._run_starts)
        self.as_runs = runs == 1 or len(self.pages) * page_bytes >= runs * _RUN_BYTES
        self._units: Indices | None = None

    def __len__(self) -> int:
        """Number of pages."""
        return len(self.pages)

    @property
    def unit_heads(self) -> int:
        """Heads in one unit of `units`: the widest that tiles both a token and the slice."""
        return gcd(self.pool.heads, self.heads)

    def units(self, page_lo: int, page_hi: int) -> Indices:
        """Unit numbers of pages [page_lo, page_hi) in staging order, counted from local head `head` of token 0.

        A unit is `unit_heads` adjacent heads of one token. Counting from the slice's own first head keeps units
        as wide as the slice even where `head` is not a multiple of it. Returns int64
        `[(page_hi - page_lo) * page_size * heads / unit_heads]`.
        """
        if self._units is None:
            tokens = self.pages[:, None] * self.pool.page_size + np.arange(self.pool.page_size, dtype=np.int64)
            first = tokens.reshape(-1, 1) * (self.pool.heads // self.unit_heads)
            self._units = (first + np.arange(self.heads // self.unit_heads, dtype=np.int64)).reshape(-1)
        per_page = self.pool.page_size * (self.heads // self.unit_heads)
        return self._units[page_lo * per_page : page_hi * per_page]

    def runs(self, page_lo: int, page_hi: int) -> Iterator[tuple[int, int, int]]:
        """Cut positions [page_lo, page_hi) into ascending runs: (first page, lo, hi), lo and hi from page_lo."""
        inside = self._run_starts[slice(*np.searchsorted(self._run_starts, (page_lo + 1, page_hi)))]
        cuts = [page_lo, *inside.tolist(), page_hi]
        for lo, hi in pairwise(cuts):
            yield int(self.pages[lo]), lo - page_lo, hi - page_lo
