"""Geometries of contiguous pages, as most pools have them."""

from __future__ import annotations

from kvctl_agent.device.base import Geometry, PageStrides


def of_rows(rows: int, width: int, src_row: int, dst_row: int, src_paged: bool, dst_paged: bool) -> Geometry:
    """Copies of `width` bytes of each row; `src_row` and `dst_row` are the bytes of a whole row on a paged side."""
    sides = [
        PageStrides(rows * row, row, width) if paged else None
        for row, paged in ((src_row, src_paged), (dst_row, dst_paged))
    ]
    return Geometry(rows, 1, width, *sides)
