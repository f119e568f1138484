"""A segment's blocks as launches on a device want them: tables that are made once, and the strips of a part."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from kvctl_agent.device.base import BlockRange, BlockRanges, Geometry, Packed, Table
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.local_shard import LocalShard
from kvctl_agent.layout.shape import Plane
from kvctl_agent.memory.addresses import SegmentAddresses

# Prompts of one length share them, and so do all writers of the same heads.
_STRETCHES = 1024


class Cut(NamedTuple):
    """What a stretch is of one table: a strip as if the stretch began at address 0 and the launch's list of pages."""

    number: int
    strip: BlockRange


class BlockTable:
    """Every block of one segment, for parts of `heads` heads, whichever those are.

    Blocks are numbered layer by layer, plane by plane, from the first layer held. Planes that are alike share a table.

    Attributes:
        gathers, scatters: the tables of each.
        planes: of a layer.
        cut, gathered: `_cut` and `_gathered`, worked out once for stretches that are alike.
    """

    def __init__(self, where: SegmentAddresses, heads: int) -> None:
        """Build it; `heads` has been checked."""
        planes, layers = where.held.segment.planes, len(where.bases)
        self.planes = len(planes)
        self.cut = lru_cache(_STRETCHES)(self._cut)
        self.gathered = lru_cache(_STRETCHES)(self._gathered)
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

    def _cut(
        self, lo: int, hi: int, page_lo: int, page_hi: int, num_pages: int, nbytes: int, head: int
    ) -> tuple[Cut, ...]:
        """Cut a contiguous stretch of a part: blocks [lo, hi), but for pages left out of the first and the last.

        Args:
            page_lo: first page of block `lo`.
            page_hi: end of the pages of block `hi - 1`.
            num_pages: of the part.
            nbytes: of the stretch.
            head: the first one, local; it has been checked.

        Raises:
            MemoryLayoutError: there are no such blocks or pages, or they do not fill the stretch: kernels trust what
                they are given.
        """
        begin = self._check(lo, hi, page_lo, page_hi, num_pages, nbytes)
        # Runs of blocks with the same pages: (blocks [lo, hi), pages [lo, hi), offset of the first).
        runs: list[tuple[int, int, int, int, int]] = []
        if hi - lo == 1:
            runs.append((lo, hi, page_lo, page_hi, 0))
        else:
            first, last = lo + bool(page_lo), hi - (page_hi < num_pages)
            if page_lo:
                runs.append((lo, first, page_lo, num_pages, 0))
            if first < last:
                runs.append((first, last, 0, num_pages, self._before[first] * num_pages - begin))
            if last < hi:
                runs.append((last, hi, 0, page_hi, self._before[last] * num_pages - begin))
        found = []
        for number, (index, head_bytes) in enumerate(zip(self._index, self._head_bytes, strict=True)):
            for lo, hi, page_lo, page_hi, offset in runs:
                if index[lo] < index[hi]:
                    pages = page_hi - page_lo
                    packed = offset - self._before[lo] * pages
                    found.append(
                        Cut(number, BlockRange(index[lo], index[hi], head * head_bytes, packed, pages, page_lo))
                    )
        return tuple(found)

    def _gathered(
        self, lo: int, hi: int, page_lo: int, page_hi: int, num_pages: int, nbytes: int, head: int, addr: int
    ) -> tuple[BlockRanges, ...]:
        """The launches that gather a stretch to an address: staging buffers are few, so that these recur, too."""
        launches: dict[int, list[Packed]] = {}
        for number, (first, end, shift, packed, pages, listed) in self.cut(
            lo, hi, page_lo, page_hi, num_pages, nbytes, head
        ):
            launches.setdefault(number, []).append((first, end, shift, packed + addr, pages, listed))
        return tuple(BlockRanges(self.gathers[number], strips) for number, strips in launches.items())

    def _check(self, lo: int, hi: int, page_lo: int, page_hi: int, num_pages: int, nbytes: int) -> int:
        """Where the stretch begins in the part."""
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


def gathers_between(ours: LocalShard, theirs: LocalShard) -> set[Geometry]:
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
