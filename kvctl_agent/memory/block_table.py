"""A segment's blocks as launches on a device want them: base addresses and packed offsets, made once per head slice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvctl_agent.device.base import Batch, Geometry
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.holding import Held
from kvctl_agent.layout.shape import Plane
from kvctl_agent.memory.addresses import SegmentAddresses


class BlockTable:
    """Local heads [head, head + heads) of every block of one segment.

    Blocks are numbered layer by layer, plane by plane, from the first layer held.

    Attributes:
        gathers, scatters: the geometries that there are of each; planes that are alike share one.
        planes: of a layer.
    """

    def __init__(self, where: SegmentAddresses, head: int, heads: int) -> None:
        """Build it; `head` and `heads` have been checked."""
        planes = where.held.segment.planes
        self.planes = len(planes)
        self._page_bytes = [plane.rows * heads * plane.head_bytes for plane in planes]
        starts = np.array([head * plane.head_bytes for plane in planes], np.int64)
        self._bases = (np.array(where.bases, np.int64).reshape(-1, len(planes)) + starts).reshape(-1)
        sizes = np.tile(np.array(self._page_bytes, np.int64), len(where.bases))
        self._before = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))  # of one page of all blocks before
        by_plane = [_gather(plane, heads, where.held.heads) for plane in planes]
        self.gathers = list(dict.fromkeys(by_plane))
        self.scatters = [_turned(geometry) for geometry in self.gathers]
        self._kinds = np.tile(np.array([self.gathers.index(each) for each in by_plane]), len(where.bases))

    def batches(
        self,
        lo: int,
        hi: int,
        *,
        page_lo: int,
        page_hi: int,
        num_pages: int,
        packed: int,
        nbytes: int,
        list_at: int,
        gather: bool,
    ) -> list[Batch]:
        """A contiguous stretch of a part: blocks [lo, hi), whole but for the pages left out of the first and the last.

        Args:
            page_lo: first page of block `lo`.
            page_hi: end of the pages of block `hi - 1`.
            num_pages: of the part.
            packed: address of the stretch.
            nbytes: of the stretch, which the blocks must fill: kernels trust what they are given.
            list_at: where the part's pages begin in the launch's list.
            gather: from pages to the stretch; else from there to pages.

        Raises:
            MemoryLayoutError: there are no such blocks or pages, or they are not `nbytes`.
        """
        if not 0 <= lo < hi <= len(self._bases) or not 0 <= page_lo < num_pages or not 0 < page_hi <= num_pages:
            raise MemoryLayoutError(
                f"blocks {lo} to {hi - 1}, from page {page_lo} to {page_hi}, lie outside the {len(self._bases)} blocks "
                f"of this rank or the {num_pages} pages of the part"
            )
        skipped = page_lo * self._page_bytes[lo % self.planes]
        left = (num_pages - page_hi) * self._page_bytes[(hi - 1) % self.planes]
        begin = int(self._before[lo]) * num_pages + skipped
        if int(self._before[hi]) * num_pages - left - begin != nbytes:
            raise MemoryLayoutError(f"{nbytes} bytes of staging are not blocks {lo} to {hi - 1} of {num_pages} pages")
        paged, flat = (0, 1) if gather else (1, 0)
        made = np.zeros((hi - lo, 5), np.int64)
        made[:, paged] = self._bases[lo:hi]
        made[:, flat] = self._before[lo:hi] * num_pages + (packed - begin)
        made[:, 2 + paged] = list_at
        made[:, 4] = num_pages
        made[0, flat] = packed
        made[0, 2 + paged] += page_lo
        made[0, 4] -= page_lo
        made[-1, 4] -= num_pages - page_hi
        geometries = self.gathers if gather else self.scatters
        if len(geometries) == 1:
            return [Batch(geometries[0], made)]
        return self._by_geometry(geometries, made, self._kinds[lo:hi])

    def _by_geometry(
        self, geometries: list[Geometry], made: npt.NDArray[np.int64], kinds: npt.NDArray[np.int64]
    ) -> list[Batch]:
        each = [Batch(geometry, made[kinds == kind]) for kind, geometry in enumerate(geometries)]
        return [batch for batch in each if len(batch.blocks)]


def gathers_between(ours: Held, theirs: Held) -> set[Geometry]:
    """Geometries of all that we can have to gather for a peer, to compile ahead."""
    heads = min(ours.head_hi, theirs.head_hi) - max(ours.head_lo, theirs.head_lo)
    return {_gather(plane, heads, ours.heads) for plane in ours.segment.planes} if heads > 0 else set()


def _gather(plane: Plane, heads: int, of: int) -> Geometry:
    """From pages to staging; a page of all heads is one wide row."""
    rows, width, distance = plane.rows, heads * plane.head_bytes, of * plane.head_bytes
    if heads == of:
        rows, width, distance = 1, rows * width, rows * width
    return Geometry(rows, width, distance, width, src_paged=True, dst_paged=False)


def _turned(geometry: Geometry) -> Geometry:
    rows, width, src_row, dst_row, src_paged, dst_paged = geometry
    return Geometry(rows, width, dst_row, src_row, dst_paged, src_paged)
