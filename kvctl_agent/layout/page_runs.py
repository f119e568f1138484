"""Page runs: stretches of pages that lie side by side in both pools, so that one descriptor moves them all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import LayoutError


class PageRuns(NamedTuple):
    """Runs as three int64 arrays of equal length: run i moves counts[i] pages from src_first[i] to dst_first[i]."""

    src_first: npt.NDArray[np.int64]
    dst_first: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


def page_run_arrays(src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike) -> PageRuns:
    """The fewest runs that move src_pages[i] to dst_pages[i] for every i, ordered by source page.

    Pages are sorted first where they are not: allocators hand pages out in descending order after a free, and the order
    in which pages of one part are written does not matter.

    Args:
        src_pages: Page indices in the writer's pool, one-dimensional, each once.
        dst_pages: As many page indices in the decode rank's pool.

    Raises:
        LayoutError: the two lists differ in length or are not one-dimensional.
    """
    # int64 before any subtraction: unsigned page indices would wrap.
    src = np.asarray(src_pages).astype(np.int64, copy=False)
    dst = np.asarray(dst_pages).astype(np.int64, copy=False)
    if src.ndim != 1 or src.shape != dst.shape:
        raise LayoutError(
            f"page lists of shapes {src.shape} and {dst.shape}: they must be two flat lists of one length"
        )
    step = np.diff(src)
    if np.any(step < 0):
        order = np.argsort(src, kind="stable")
        src, dst = src[order], dst[order]
        step = np.diff(src)
    breaks = np.flatnonzero((step != 1) | (np.diff(dst) != 1)) + 1
    first = np.concatenate((np.zeros(min(1, src.size), dtype=np.int64), breaks))
    return PageRuns(src[first], dst[first], np.diff(first, append=src.size))
