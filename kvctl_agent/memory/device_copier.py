"""Copies in a device's memory: one launch for all layers of K and V, and for several parts that landed together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvctl_agent.device.base import Copies, Places, Strip, Strips, Table
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.block_table import Stretched
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
        table = rows.memory.block_table(rows.heads)
        launches = _Launches()
        for piece, stretch in zip(pieces, into, strict=True):
            _check_room(piece.nbytes, stretch)
            first, last = piece.spans[0], piece.spans[-1]
            stretched = Stretched(
                first.layer * table.planes + first.plane,
                last.layer * table.planes + last.plane + 1,
                first.page_lo,
                last.page_hi,
                len(rows),
                stretch.addr,
                piece.nbytes,
            )
            launches.add(table.gathers, table.strips(stretched, rows.head, 0))
        return self._copies.begin(launches.all(), rows.places)

    def scatter(self, landed: Sequence[Landed]) -> Work:
        launches = _Launches()
        lists: list[Places] = []
        listed = 0
        for rows, layout, region in landed:
            _check_room(layout.nbytes, region)
            table, pages = rows.memory.block_table(rows.heads), len(rows)
            lo = layout.first_layer * table.planes
            hi = lo + layout.num_layers * table.planes
            stretched = Stretched(lo, hi, 0, pages, pages, region.addr, layout.nbytes)
            launches.add(table.scatters, table.strips(stretched, rows.head, listed))
            lists.append(rows.places)
            listed += pages
        return self._copies.begin(launches.all(), lists[0] if len(lists) == 1 else np.concatenate(lists))

    def prepare(self, memory: SegmentMemory, head: int, heads: int) -> None:
        memory.check_heads(head, heads)
        self._copies.prepare([table.geometry for table in memory.block_table(heads).scatters])

    def close(self) -> None:
        self._copies.close()


class _Launches:
    """One for each table, with the strips of all parts."""

    def __init__(self) -> None:
        self._by_table: dict[int, tuple[Table, list[Strip]]] = {}

    def add(self, tables: Sequence[Table], strips: Sequence[list[Strip]]) -> None:
        for table, some in zip(tables, strips, strict=True):
            if some:
                self._by_table.setdefault(id(table), (table, []))[1].extend(some)

    def all(self) -> list[Strips]:
        return [Strips(table, strips) for table, strips in self._by_table.values()]


def _check_room(nbytes: int, stretch: Stretch) -> None:
    if nbytes > stretch.nbytes:
        raise MemoryLayoutError(f"{nbytes} bytes do not fit into {stretch.nbytes} bytes of staging")
