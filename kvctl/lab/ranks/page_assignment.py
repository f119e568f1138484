"""Which page indices a room gets in a rank's pool: like an engine's allocator after hours of use, or a fresh one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int64]


def assign_pages(counts: Sequence[int], pool_pages: int, order: str, seed: int) -> list[Pages]:
    """Disjoint page indices for each room; page 0 is left alone, as engines reserve it.

    Args:
        counts: pages of each room; together at most `pool_pages - 1`.
        pool_pages: pages of the pool.
        order: "random" scatters every room over the whole pool; "contiguous" gives ascending runs.
        seed: decides the scatter; give every rank its own, so that no two ranks agree on a page by accident.
    """
    if order == "random":
        free = np.random.default_rng(seed).permutation(np.arange(1, pool_pages, dtype=np.int64))
    else:
        free = np.arange(1, pool_pages, dtype=np.int64)
    ends = np.cumsum(np.asarray(counts, dtype=np.int64))
    return [free[end - count : end] for end, count in zip(ends.tolist(), counts, strict=True)]


def unused_pages(assigned: Sequence[Pages], pool_pages: int) -> Pages:
    """Every page that no room has: nothing may write to them."""
    used = np.zeros(pool_pages, dtype=bool)
    for pages in assigned:
        used[pages] = True
    return np.flatnonzero(~used)
