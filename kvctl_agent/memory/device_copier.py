"""Copier for GPU memory: one kernel launch copies all layers of K and V, or several landed parts together.

A kernel reads the addresses of a segment's blocks (one plane of one layer each) from a block table; a launch has the
ranges of that table to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from kvctl_agent.device.base import BlockRange, BlockRanges, Geometry, Packed, PageStrides, RowCopies, Table
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.memory.addresses import SegmentAddresses
from kvctl_agent.memory.copier import LandedPart, PendingCopy
from kvctl_agent.memory.part_layout import Piece
from kvctl_agent.memory.region import MemorySpan
from kvctl_agent.memory.segment import RowIndex, SegmentMemory


class DeviceCopier:
    """Converts pieces and parts to kernel launches on one stream, `copies`, which the copier owns and closes.

    Pieces are large, because writes saturate NVLink only if they are large (H200, cuda_ipc: 64 writes of 4 MiB reach
    107 GB/s, one of 256 MiB 373 GB/s).
    """

    piece_bytes = 128 << 20
    pieces_at_once = 1
    parts_at_once = 64

    def __init__(self, copies: RowCopies) -> None:
        self.copies = copies

    def gather(self, rows: RowIndex, pieces: Sequence[Piece], into: Sequence[MemorySpan]) -> PendingCopy:
        table, num_pages = block_table(rows.memory, rows.heads), len(rows)
        planes = table.planes
        launches: list[BlockRanges] = []
        for (_, nbytes, spans), target in zip(pieces, into, strict=True):
            if nbytes > target.nbytes:
                raise _too_large(nbytes, target)
            layer, plane, page_lo, _ = spans[0]
            last_layer, last_plane, _, page_hi = spans[-1]
            lo, hi = layer * planes + plane, last_layer * planes + last_plane + 1
            launches += table.gather_launches(lo, hi, page_lo, page_hi, num_pages, nbytes, rows.head, target.addr)
        return self.copies.begin(launches, rows.page_ids)

    def scatter(self, landed: Sequence[LandedPart]) -> PendingCopy:
        by_table: dict[Table, list[Packed]] = {}
        page_lists = []
        pages_before = 0
        for rows, layout, region in landed:
            nbytes, num_pages, addr = layout.nbytes, rows.raw_pages.size, region.addr
            if nbytes > region.nbytes:
                raise _too_large(nbytes, region)
            blocks = block_table(rows.memory, rows.heads)
            lo = layout.first_layer * blocks.planes
            hi = lo + layout.num_layers * blocks.planes
            for table, (first, end, shift, packed, pages, first_page) in blocks.table_ranges(
                lo, hi, 0, num_pages, num_pages, nbytes, rows.head
            ):
                block_range = first, end, shift, packed + addr, pages, first_page + pages_before
                by_table.setdefault(blocks.scatters[table], []).append(block_range)
            page_lists.append(rows.raw_pages)
            pages_before += num_pages
        launches = [BlockRanges(table, ranges) for table, ranges in by_table.items()]
        if len(page_lists) == 1:
            page_ids = landed[0].rows.page_ids
        else:
            # Converts and joins the page ids of all parts in one call; they are in bounds, so they fit into int32.
            page_ids = np.concatenate(page_lists, dtype=np.int32, casting="unsafe")
        return self.copies.begin(launches, page_ids)

    def prepare(self, memory: SegmentMemory, head: int, heads: int, checksum: bool = False) -> None:
        """Compiles the kernels that scatter to local heads [head, head + heads) and waits for the compiler.

        If `checksum`, compiles the kernels that compute the checksum of these heads too.

        Raises:
            DeviceError: a kernel does not compile.
        """
        memory.check_heads(head, heads)
        table = block_table(memory, heads)
        self.copies.prepare([each.geometry for each in table.scatters])
        if checksum:
            self.copies.prepare([each.geometry for each in table.gathers], checksum=True)

    def close(self) -> None:
        self.copies.close()


def _too_large(nbytes: int, span: MemorySpan) -> MemoryLayoutError:
    return MemoryLayoutError(f"{nbytes} bytes do not fit into {span.nbytes} bytes of staging")


# Entries are shared by rooms of the same prompt length, and by all writers of the same heads.
_CACHED_SPANS = 1024


class TableRange(NamedTuple):
    """A block range and the number of its table.

    The range is relative: its span is at address 0, and its pages are the first in the launch's page list.
    """

    table: int
    block_range: BlockRange


class BlockTable:
    """Addresses of all blocks of one segment, for copying parts of `heads` consecutive heads.

    Blocks are numbered by layer, then by plane, from the first local layer. Planes of equal geometry share a table.

    Attributes:
        gathers, scatters: The tables for gathers and for scatters, one for each geometry.
        table_ranges: `_table_ranges` with a cache.
        gather_launches: `_gather_launches` with a cache.
    """

    def __init__(self, addresses: SegmentAddresses, heads: int) -> None:
        """Builds the tables for parts of `heads` heads, which the caller has checked."""
        planes, layers = addresses.shard.segment.planes, len(addresses.bases)
        self.planes = len(planes)
        self.table_ranges = lru_cache(_CACHED_SPANS)(self._table_ranges)
        self.gather_launches = lru_cache(_CACHED_SPANS)(self._gather_launches)
        self._page_bytes = [plane.rows * heads * plane.head_bytes for plane in planes]
        # For each block, the bytes of one page of all blocks before it.
        self._offsets = list(accumulate(self._page_bytes * layers, initial=0))
        bases = np.array(addresses.bases, np.int64).reshape(-1)
        offsets = np.array(self._offsets[:-1], np.int64)
        by_plane = [gather_geometry(addresses, number, heads) for number in range(len(planes))]
        self.gathers: list[Table] = []
        self.scatters: list[Table] = []
        self._head_strides: list[int] = []
        self._index: list[list[int]] = []  # by table, the number of its blocks before each block
        for geometry in dict.fromkeys(by_plane):
            in_table = [plane_geometry == geometry for plane_geometry in by_plane]
            mask = np.array(in_table * layers)
            self.gathers.append(Table(geometry, bases[mask], offsets[mask]))
            self.scatters.append(Table(geometry.reversed(), bases[mask], offsets[mask]))
            self._head_strides.append(addresses.strides[in_table.index(True)].head)
            self._index.append(list(accumulate(in_table * layers, initial=0)))

    def _table_ranges(
        self, lo: int, hi: int, page_lo: int, page_hi: int, num_pages: int, nbytes: int, head: int
    ) -> tuple[TableRange, ...]:
        """Returns the block ranges, table by table, that make up a contiguous span of a part.

        The span has blocks [lo, hi), from page `page_lo` of the first block to page `page_hi` of the last.

        Args:
            lo, hi: Blocks [lo, hi).
            page_lo: First page in block `lo`.
            page_hi: End of the pages in block `hi - 1`.
            head: First local head; the caller has checked it.

        Raises:
            MemoryLayoutError: the blocks or pages do not exist, or do not fill `nbytes`. Kernels make no checks.
        """
        begin = self._check(lo, hi, page_lo, page_hi, num_pages, nbytes)
        # Runs of blocks with the same pages: (block lo, block hi, page lo, page hi, offset of the first block).
        runs: list[tuple[int, int, int, int, int]] = []
        if hi - lo == 1:
            runs.append((lo, hi, page_lo, page_hi, 0))
        else:
            first, last = lo + bool(page_lo), hi - (page_hi < num_pages)
            if page_lo:
                runs.append((lo, first, page_lo, num_pages, 0))
            if first < last:
                runs.append((first, last, 0, num_pages, self._offsets[first] * num_pages - begin))
            if last < hi:
                runs.append((last, hi, 0, page_hi, self._offsets[last] * num_pages - begin))
        ranges = []
        for table, (index, stride) in enumerate(zip(self._index, self._head_strides, strict=True)):
            for lo, hi, page_lo, page_hi, offset in runs:
                if index[lo] < index[hi]:
                    pages = page_hi - page_lo
                    packed = offset - self._offsets[lo] * pages
                    ranges.append(
                        TableRange(table, BlockRange(index[lo], index[hi], head * stride, packed, pages, page_lo))
                    )
        return tuple(ranges)

    def _gather_launches(
        self, lo: int, hi: int, page_lo: int, page_hi: int, num_pages: int, nbytes: int, head: int, addr: int
    ) -> tuple[BlockRanges, ...]:
        """Returns the launches that gather a span to address `addr`; the other arguments are those of `_table_ranges`.

        The result is cached: there are few staging buffers, so the same launches recur.
        """
        launches: dict[int, list[Packed]] = {}
        for table, (first, end, shift, packed, pages, first_page) in self.table_ranges(
            lo, hi, page_lo, page_hi, num_pages, nbytes, head
        ):
            launches.setdefault(table, []).append((first, end, shift, packed + addr, pages, first_page))
        return tuple(BlockRanges(self.gathers[table], ranges) for table, ranges in launches.items())

    def _check(self, lo: int, hi: int, page_lo: int, page_hi: int, num_pages: int, nbytes: int) -> int:
        """Checks a span and returns its offset in the part, in bytes; arguments and errors as for `_table_ranges`."""
        blocks = len(self._offsets) - 1
        if not 0 <= lo < hi <= blocks or not 0 <= page_lo < num_pages or not 0 < page_hi <= num_pages:
            raise MemoryLayoutError(
                f"blocks {lo} to {hi - 1}, from page {page_lo} to {page_hi}, lie outside the {blocks} blocks of this "
                f"rank or the {num_pages} pages of the part"
            )
        begin = self._offsets[lo] * num_pages + page_lo * self._page_bytes[lo % self.planes]
        end = self._offsets[hi] * num_pages - (num_pages - page_hi) * self._page_bytes[(hi - 1) % self.planes]
        if end - begin != nbytes:
            raise MemoryLayoutError(
                f"{nbytes} bytes of staging do not match blocks {lo} to {hi - 1} of {num_pages} pages"
            )
        return begin


def block_table(memory: SegmentMemory, heads: int) -> BlockTable:
    """Returns the segment's block table for `heads` local heads, cached while the pool is open.

    Raises:
        MemoryLayoutError: the rank has fewer heads than that.
    """
    key = "block table", heads
    table: BlockTable | None = memory.derived.get(key)
    if table is None:
        memory.check_heads(0, heads)
        table = memory.derived[key] = BlockTable(memory.addresses, heads)
    return table


def gather_geometries(local: SegmentAddresses, remote: LocalShard) -> set[Geometry]:
    """Returns the geometries of all gathers for a peer with shard `remote`, to compile their kernels in advance."""
    heads = min(local.shard.head_hi, remote.head_hi) - max(local.shard.head_lo, remote.head_lo)
    planes = range(len(local.strides)) if heads > 0 else ()
    return {gather_geometry(local, plane, heads) for plane in planes}


def gather_geometry(addresses: SegmentAddresses, plane: int, heads: int) -> Geometry:
    """Returns the geometry for gathering `heads` local heads of a plane."""
    _, rows, head_bytes = addresses.shard.segment.planes[plane]
    return Geometry(rows, heads, head_bytes, page_strides(addresses, plane), None)


def page_strides(addresses: SegmentAddresses, plane: int) -> PageStrides:
    """Returns the strides of a plane for kernels."""
    return PageStrides(*addresses.strides[plane], addresses.split, addresses.split_stride(plane))
