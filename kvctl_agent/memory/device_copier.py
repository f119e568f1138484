"""Copier for a device's memory: one launch copies all layers of K and V, and several landed parts together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvctl_agent.device.base import BlockRanges, Packed, RowCopies, Table
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.copier import LandedPart, PendingCopy
from kvctl_agent.memory.part_layout import Piece
from kvctl_agent.memory.region import MemorySpan
from kvctl_agent.memory.row_index import RowIndex
from kvctl_agent.memory.segment import SegmentMemory


class DeviceCopier:
    """Converts pieces and parts to kernel launches on one stream, which the copier owns.

    Pieces are large, because writes saturate NVLink only if they are large (H200, cuda_ipc: 64 writes of 4 MiB reach
    107 GB/s, one of 256 MiB 373 GB/s).
    """

    piece_bytes = 128 << 20
    pieces_at_once = 1
    parts_at_once = 64

    def __init__(self, copies: RowCopies) -> None:
        self._copies = copies

    def gather(self, rows: RowIndex, pieces: Sequence[Piece], into: Sequence[MemorySpan]) -> PendingCopy:
        table, num_pages = rows.memory.block_table(rows.heads), len(rows)
        planes = table.planes
        launches: list[BlockRanges] = []
        for (_, nbytes, spans), target in zip(pieces, into, strict=True):
            if nbytes > target.nbytes:
                raise _too_large(nbytes, target)
            layer, plane, page_lo, _ = spans[0]
            last_layer, last_plane, _, page_hi = spans[-1]
            lo, hi = layer * planes + plane, last_layer * planes + last_plane + 1
            launches += table.gather_launches(lo, hi, page_lo, page_hi, num_pages, nbytes, rows.head, target.addr)
        return self._copies.begin(launches, rows.page_ids)

    def scatter(self, landed: Sequence[LandedPart]) -> PendingCopy:
        by_table: dict[Table, list[Packed]] = {}
        page_lists = []
        pages_before = 0
        for rows, layout, region in landed:
            nbytes, num_pages, addr = layout.nbytes, rows.raw_pages.size, region.addr
            if nbytes > region.nbytes:
                raise _too_large(nbytes, region)
            blocks = rows.memory.block_table(rows.heads)
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
        return self._copies.begin(launches, page_ids)

    def prepare(self, memory: SegmentMemory, head: int, heads: int) -> None:
        memory.check_heads(head, heads)
        self._copies.prepare([table.geometry for table in memory.block_table(heads).scatters])

    def close(self) -> None:
        self._copies.close()


def _too_large(nbytes: int, span: MemorySpan) -> MemoryLayoutError:
    return MemoryLayoutError(f"{nbytes} bytes do not fit into {span.nbytes} bytes of staging")
