"""Copies in a device's memory: one launch for all layers of K and V, and for several parts that landed together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvctl_agent.device.base import Copies, Places, Strip, Strips, Table
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.block_table import Cut
from kvctl_agent.memory.copier import Landed, Work
from kvctl_agent.memory.parts import Piece
from kvctl_agent.memory.region import Stretch
from kvctl_agent.memory.rows import RowIndex
from kvctl_agent.memory.segment import SegmentMemory


class DeviceCopier:
    """Turns pieces and parts into launches on one stream, which it owns.

    A device keeps up with NVLink only where a write is large (H200, cuda_ipc: 64 writes of 4 MiB 107 GB/s, one of
    256 MiB 373), so that pieces are.
    """

    piece_bytes = 128 << 20
    pieces_at_once = 1
    parts_at_once = 64

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def gather(self, rows: RowIndex, pieces: Sequence[Piece], into: Sequence[Stretch]) -> Work:
        table, launches = rows.memory.block_table(rows.heads), _Launches()
        planes, num_pages = table.planes, len(rows)
        for (_, nbytes, spans), stretch in zip(pieces, into, strict=True):
            _check_room(nbytes, stretch)
            layer, plane, page_lo, _ = spans[0]
            last_layer, last_plane, _, page_hi = spans[-1]
            lo, hi = layer * planes + plane, last_layer * planes + last_plane + 1
            cuts = table.cut(lo, hi, page_lo, page_hi, num_pages, nbytes, rows.head)
            launches.add(table.gathers, cuts, stretch.addr, 0)
        return self._copies.begin(launches.all(), rows.places)

    def scatter(self, landed: Sequence[Landed]) -> Work:
        launches = _Launches()
        lists: list[Places] = []
        listed = 0
        for rows, layout, region in landed:
            nbytes, num_pages = layout.nbytes, len(rows)
            _check_room(nbytes, region)
            table = rows.memory.block_table(rows.heads)
            lo = layout.first_layer * table.planes
            hi = lo + layout.num_layers * table.planes
            cuts = table.cut(lo, hi, 0, num_pages, num_pages, nbytes, rows.head)
            launches.add(table.scatters, cuts, region.addr, listed)
            lists.append(rows.places)
            listed += num_pages
        return self._copies.begin(launches.all(), lists[0] if len(lists) == 1 else np.concatenate(lists))

    def prepare(self, memory: SegmentMemory, head: int, heads: int) -> None:
        memory.check_heads(head, heads)
        self._copies.prepare([table.geometry for table in memory.block_table(heads).scatters])

    def close(self) -> None:
        self._copies.close()


class _Launches:
    """One for each table, with the strips of all parts."""

    def __init__(self) -> None:
        self._by_table: dict[Table, list[Strip]] = {}

    def add(self, tables: Sequence[Table], cuts: Sequence[Cut], addr: int, listed: int) -> None:
        """Adds a stretch at `addr`, whose part's pages begin at `listed` in the list of pages."""
        for number, (lo, hi, shift, packed, pages, begin) in cuts:
            strip = Strip(lo, hi, shift, packed + addr, pages, begin + listed)
            self._by_table.setdefault(tables[number], []).append(strip)

    def all(self) -> list[Strips]:
        return [Strips(table, strips) for table, strips in self._by_table.items()]


def _check_room(nbytes: int, stretch: Stretch) -> None:
    if nbytes > stretch.nbytes:
        raise MemoryLayoutError(f"{nbytes} bytes do not fit into {stretch.nbytes} bytes of staging")
