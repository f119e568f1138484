"""A segment's blocks as launches on a device want them: tables that are made once, and the strips of a part."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from kvctl_agent.device.base import Geometry, Strip, Table
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.holding import Held
from kvctl_agent.layout.shape import Plane
from kvctl_agent.memory.addresses import SegmentAddresses


class Stretched(NamedTuple):
    """A contiguous stretch of a part: blocks [lo, hi), whole but for pages left out of the first and the last.

    Attributes:
        page_lo: first page of block `lo`.
        page_hi: end of the pages of block `hi - 1`.
        num_pages: of the part.
        addr, nbytes: of the stretch.
    """

    lo: int
    hi: int
    page_lo: int
    page_hi: int
    num_pages: int
    addr: int
    nbytes: int


class BlockTable:
    """Every block of one segment, for parts of `heads` heads, whichever those are.

    Blocks are numbered layer by layer, plane by plane, from the first layer held. Planes that are alike share a table.

    Attributes:
        gathers, scatters: the tables of each.
        planes: of a layer.
    """

    def __init__(self, where: SegmentAddresses, heads: int) -> None:
        """Build it; `heads` has been checked."""
        planes, layers = where.held.segment.planes, len(where.bases)
        self.planes = len(planes)
        self._page_bytes = [plane.rows * heads * plane.head_bytes for plane in planes]
        self._before = list(accumulate(self._page_bytes * layers, initial=0))  # of one page of all blocks before
        bases = np.array(where.bases, np.int64).reshape(-1)
        before = np.array(self._before[:-1], np.int64)
        by_plane = [_gather(plane, heads, where.held.heads) for plane in planes]
        self.gathers: list[Table] = []
        self.scatters: list[Table] = []
        self._head_bytes: list[int] = []
        self._index: list[list[int]] = []  # by table, how many of its blocks come before each block
        for geometry in dict.fromkeys(by_plane):
            mine = [each == geometry for each in by_plane]
            chosen = np.array(mine * layers)
            places = bases[chosen], before[chosen]
            self.gathers.append(Table(geometry, *places))
            self.scatters.append(Table(_turned(geometry), *places))
            self._head_bytes.append(planes[mine.index(True)].head_bytes)
            self._index.append(list(accumulate(mine * layers, initial=0)))

    def strips(self, stretch: Stretched, head: int, listed: int) -> list[list[Strip]]:
        """What a stretch is of each table.

        Args:
            head: the first one, local; it has been checked.
            listed: where the part's pages begin in the launch's list.

        Raises:
            MemoryLayoutError: there are no such blocks or pages, or they do not fill the stretch: kernels trust what
                they are given.
        """
        lo, hi, page_lo, page_hi, num_pages, addr, _ = stretch
        begin = self._check(stretch)
        # Runs of blocks with the same pages: (blocks [lo, hi), pages [lo, hi), address of the first).
        runs: list[tuple[int, int, int, int, int]] = []
        if hi - lo == 1:
            runs.append((lo, hi, page_lo, page_hi, addr))
        else:
            first, last = lo + bool(page_lo), hi - (page_hi < num_pages)
            if page_lo:
                runs.append((lo, first, page_lo, num_pages, addr))
            if first < last:
                runs.append((first, last, 0, num_pages, addr + self._before[first] * num_pages - begin))
            if last < hi:
                runs.append((last, hi, 0, page_hi, addr + self._before[last] * num_pages - begin))
        found = []
        for index, head_bytes in zip(self._index, self._head_bytes, strict=True):
            strips = []
            for lo, hi, page_lo, page_hi, addr in runs:
                if index[lo] < index[hi]:
                    pages = page_hi - page_lo
                    packed = addr - self._before[lo] * pages
                    strips.append(Strip(index[lo], index[hi], head * head_bytes, packed, pages, listed + page_lo))
            found.append(strips)
        return found

    def _check(self, stretch: Stretched) -> int:
        """Where the stretch begins in the part."""
        lo, hi, page_lo, page_hi, num_pages, _, nbytes = stretch
        blocks = len(self._before) - 1
        if not 0 <= lo < hi <= blocks or not 0 <= page_lo < num_pages or not 0 < page_hi <= num_pages:
            raise MemoryLayoutError(
                f"blocks {lo} to {hi - 1}, from page {page_lo} to {page_hi}, lie outside the {blocks} blocks of this "
                f"rank or the {num_pages} pages of the part"
            )
        begin = self._before[lo] * num_pages + page_lo * self._page_bytes[lo % self.planes]
        end = self._before[hi] * num_pages - (num_pages - page_hi) * self._page_bytes[(hi - 1) % self.planes]
        if end - begin != nbytes:
            raise MemoryLayoutError(f"{nbytes} bytes of staging are not blocks {lo} to {hi - 1} of {num_pages} pages")
        return begin


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
