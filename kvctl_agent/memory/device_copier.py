"""Copies in a device's memory: one launch for all layers of K and V, and for several parts that landed together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvctl_agent.device.base import Batch, Blocks, Copies, Geometry, Places
from kvctl_agent.errors import MemoryLayoutError
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
        table = rows.memory.block_table(rows.head, rows.heads)
        found: list[Batch] = []
        for piece, stretch in zip(pieces, into, strict=True):
            _check_room(piece.nbytes, stretch)
            first, last = piece.spans[0], piece.spans[-1]
            found += table.batches(
                first.layer * table.planes + first.plane,
                last.layer * table.planes + last.plane + 1,
                page_lo=first.page_lo,
                page_hi=last.page_hi,
                num_pages=len(rows),
                packed=stretch.addr,
                nbytes=piece.nbytes,
                list_at=0,
                gather=True,
            )
        return self._copies.begin(_together(found), rows.places)

    def scatter(self, landed: Sequence[Landed]) -> Work:
        found: list[Batch] = []
        lists: list[Places] = []
        at = 0
        for rows, layout, region in landed:
            _check_room(layout.nbytes, region)
            table = rows.memory.block_table(rows.head, rows.heads)
            found += table.batches(
                layout.first_layer * table.planes,
                (layout.first_layer + layout.num_layers) * table.planes,
                page_lo=0,
                page_hi=len(rows),
                num_pages=len(rows),
                packed=region.addr,
                nbytes=layout.nbytes,
                list_at=at,
                gather=False,
            )
            lists.append(rows.places)
            at += len(rows)
        return self._copies.begin(_together(found), lists[0] if len(lists) == 1 else np.concatenate(lists))

    def prepare(self, memory: SegmentMemory, head: int, heads: int) -> None:
        self._copies.prepare(memory.block_table(head, heads).scatters)

    def close(self) -> None:
        self._copies.close()


def _check_room(nbytes: int, stretch: Stretch) -> None:
    if nbytes > stretch.nbytes:
        raise MemoryLayoutError(f"{nbytes} bytes do not fit into {stretch.nbytes} bytes of staging")


def _together(batches: Iterable[Batch]) -> list[Batch]:
    """One batch for each geometry, so one launch."""
    by_geometry: dict[Geometry, list[Blocks]] = {}
    for geometry, blocks in batches:
        by_geometry.setdefault(geometry, []).append(blocks)
    return [
        Batch(geometry, blocks[0] if len(blocks) == 1 else np.concatenate(blocks))
        for geometry, blocks in by_geometry.items()
    ]
