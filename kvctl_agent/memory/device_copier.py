"""Copies in a device's memory: one launch for all layers of K and V, and for several parts that landed together."""

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
    """Turns pieces and parts into launches on one stream, which it owns.

    A device keeps up with NVLink only where a write is large (H200, cuda_ipc: 64 writes of 4 MiB 107 GB/s, one of
    256 MiB 373), so that pieces are.
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
        for (_, nbytes, spans), stretch in zip(pieces, into, strict=True):
            if nbytes > stretch.nbytes:
                raise _too_large(nbytes, stretch)
            layer, plane, page_lo, _ = spans[0]
            last_layer, last_plane, _, page_hi = spans[-1]
            lo, hi = layer * planes + plane, last_layer * planes + last_plane + 1
            launches += table.gathered(lo, hi, page_lo, page_hi, num_pages, nbytes, rows.head, stretch.addr)
        return self._copies.begin(launches, rows.places)

    def scatter(self, landed: Sequence[LandedPart]) -> PendingCopy:
        by_table: dict[Table, list[Packed]] = {}
        lists = []
        listed = 0
        for rows, layout, region in landed:
            nbytes, num_pages, addr = layout.nbytes, rows.given.size, region.addr
            if nbytes > region.nbytes:
                raise _too_large(nbytes, region)
            blocks = rows.memory.block_table(rows.heads)
            lo = layout.first_layer * blocks.planes
            hi = lo + layout.num_layers * blocks.planes
            for number, (first, end, shift, packed, pages, begin) in blocks.cut(
                lo, hi, 0, num_pages, num_pages, nbytes, rows.head
            ):
                strip = first, end, shift, packed + addr, pages, begin + listed
                by_table.setdefault(blocks.scatters[number], []).append(strip)
            lists.append(rows.given)
            listed += num_pages
        launches = [BlockRanges(table, strips) for table, strips in by_table.items()]
        # As `places`, all at once: pages are in bounds, and so they fit.
        together = landed[0].rows.places if len(lists) == 1 else np.concatenate(lists, dtype=np.int32, casting="unsafe")
        return self._copies.begin(launches, together)

    def prepare(self, memory: SegmentMemory, head: int, heads: int) -> None:
        memory.check_heads(head, heads)
        self._copies.prepare([table.geometry for table in memory.block_table(heads).scatters])

    def close(self) -> None:
        self._copies.close()


def _too_large(nbytes: int, stretch: MemorySpan) -> MemoryLayoutError:
    return MemoryLayoutError(f"{nbytes} bytes do not fit into {stretch.nbytes} bytes of staging")
