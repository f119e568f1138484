"""Page runs: pages that are consecutive in both pools, so that one descriptor moves them all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import LayoutError


class PageRuns(NamedTuple):
    """Page runs as three int64 arrays: run i moves counts[i] pages from src_first[i] to dst_first[i]."""

    src_first: npt.NDArray[np.int64]
    dst_first: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


def page_run_arrays(src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike) -> PageRuns:
    """Return the fewest runs that move src_pages[i] to dst_pages[i] for every i, ordered by source page.

    Unsorted pages are sorted first: allocators return pages in descending order after a free, and the order in which
    the pages of a part are written does not matter.

    Args:
        src_pages: Page indices in the writer's pool, one-dimensional, without duplicates.
        dst_pages: Page indices in the decode rank's pool, of the same length.

    Raises:
        LayoutError: the two lists differ in length or are not one-dimensional.
    """
    # Converted to int64 before any subtraction, because unsigned page indices would wrap.
    src = np.asarray(src_pages).astype(np.int64, copy=False)
    dst = np.asarray(dst_pages).astype(np.int64, copy=False)
    if src.ndim != 1 or src.shape != dst.shape:
        raise LayoutError(
            f"page lists of shapes {src.shape} and {dst.shape}: they must be one-dimensional and of equal length"
        )
    step = np.diff(src)
    if np.any(step < 0):
        order = np.argsort(src, kind="stable")
        src, dst = src[order], dst[order]
        step = np.diff(src)
    breaks = np.flatnonzero((step != 1) | (np.diff(dst) != 1)) + 1
    first = np.concatenate((np.zeros(min(1, src.size), dtype=np.int64), breaks))
    return PageRuns(src[first], dst[first], np.diff(first, append=src.size))
