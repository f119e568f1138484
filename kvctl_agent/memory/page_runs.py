"""Runs of adjacent pages, which path bulk sends with one descriptor for each layer and plane.

numpy releases the GIL to sort, and in loops over more than 500 elements. Beside an engine's thread that runs Python
each release may cost a wait of 5 ms, and the descriptors of a room of 1,024 tokens took up to seven of them. The native
form (`_row_copies.c`) keeps the GIL; this one is the reference and the fallback.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import LayoutError
from kvctl_agent.memory import native_copier
from kvctl_agent.memory.addresses import Indices, PageSteps

Pages = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class PageRuns(NamedTuple):
    """Runs of adjacent pages: run i has counts[i] pages, from src_first[i] on and to dst_first[i] on."""

    src_first: npt.NDArray[np.int64]
    dst_first: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


def page_run_arrays(src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike, page_bytes: int = 1) -> PageRuns:
    """Returns the fewest runs that move src_pages[i] to dst_pages[i] for every i, ordered by source page.

    A page is named by its offset in the pool; with `page_bytes` 1, by its index.

    Unsorted pages are sorted first: allocators return pages in descending order after a free, and the order in which
    the pages of a part are written does not matter.

    Args:
        src_pages: Pages in the writer's pool, one-dimensional, without duplicates.
        dst_pages: Pages in the decode rank's pool, of the same length.
        page_bytes: Distance of adjacent pages.

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
    breaks = np.flatnonzero((step != page_bytes) | (np.diff(dst) != page_bytes)) + 1
    first = np.concatenate((np.zeros(min(1, src.size), dtype=np.int64), breaks))
    return PageRuns(src[first], dst[first], np.diff(first, append=src.size))


class RunDescriptors(NamedTuple):
    """Descriptors of page runs: local addresses, the peer's addresses, and bytes, uint64 `[blocks * runs]` each."""

    local: Words
    remote: Words
    sizes: Words


def run_descriptors(
    src: Pages,
    dst: Pages,
    src_steps: PageSteps,
    dst_steps: PageSteps,
    page_bytes: int,
    local: Indices,
    remote: Indices,
) -> RunDescriptors:
    """Returns the descriptors that move pages `src` to pages `dst`, in every block (a plane of a layer).

    Args:
        src, dst: Transfer pages, int32 or int64 `[pages]`.
        src_steps, dst_steps: Their distances in a block.
        page_bytes: Bytes of a page; pages at this distance on both sides are adjacent.
        local, remote: Addresses of the blocks, int64 `[blocks]`.
    """
    if native_copier.BUILT:
        packed = native_copier.native_page_descriptors(src, dst, src_steps, dst_steps, page_bytes, local, remote)
        return RunDescriptors(*(np.frombuffer(words, np.uint64) for words in packed))
    first, onto, counts = page_run_arrays(src_steps.offsets(src), dst_steps.offsets(dst), page_bytes)
    sizes = np.broadcast_to(counts * page_bytes, (len(local), len(counts)))
    return RunDescriptors(*(_flat(each) for each in (local[:, None] + first, remote[:, None] + onto, sizes)))


def _flat(numbers: Indices) -> Words:
    return numbers.reshape(-1).astype(np.uint64)
