"""Chooses the variant of the copy kernel for a geometry: the widest words that its sizes and addresses allow."""

from __future__ import annotations

from typing import NamedTuple

from kvctl_agent.device.base import Geometry
from kvctl_agent.errors import DeviceError

# The widest access of one GPU thread, in bytes.
_ACCESS = 16


class Tile(NamedTuple):
    """Size of the tile that one thread block copies at a time.

    Attributes:
        nbytes: Maximum bytes of a tile, a power of two.
        warps: Warps of a thread block, a power of two.
    """

    nbytes: int
    warps: int


class Variant(NamedTuple):
    """Compile-time constants of the kernel; see `copy_rows` for those not listed here.

    Attributes:
        tile_units: Units that one thread block copies at a time.
        warps: Warps of a thread block.
        ranges: Whether the kernel copies block ranges of a table.
    """

    rows: int
    split: int
    unit: int
    src_row: int
    dst_row: int
    src_paged: bool
    dst_paged: bool
    align: int
    tile_units: int
    warps: int
    ranges: bool

    @property
    def word(self) -> int:
        """Bytes of a word; two words of 8 bytes become one access."""
        return min(self.align, 8)

    @property
    def page_units(self) -> int:
        """Units of a page."""
        return self.rows * self.split

    def tiles(self, pages: int) -> int:
        """Return the tiles of a block of `pages` pages."""
        return -(-pages * self.page_units // self.tile_units)


def variant(geometry: Geometry, bits: int, tile: Tile, ranges: bool = False) -> Variant:
    """Return the variant for blocks of a geometry.

    Args:
        geometry: Geometry of the blocks.
        bits: Bitwise or of all addresses.
        tile: Size of a tile.
        ranges: Whether the kernel copies block ranges of a table.

    Raises:
        DeviceError: the geometry is invalid.
    """
    rows, width, src_row, dst_row, src_paged, dst_paged = geometry
    if rows < 1 or not 1 <= width <= min(src_row, dst_row):
        raise DeviceError(f"invalid row geometry: {geometry}")
    if src_row == dst_row == width:
        # A page is contiguous on both sides, so it is treated as one row.
        rows, width = 1, rows * width
        src_row = dst_row = width
    align = alignment(width | src_row | dst_row | bits)
    # At most 16 accesses per thread: narrow accesses need smaller tiles, or registers spill.
    tile_bytes = min(tile.nbytes, tile.warps * 32 * 16 * align)
    # Units are powers of two, so that no thread idles: a row of 1,152 bytes is nine units of 128.
    unit = min(_lowest_bit(width), tile_bytes)
    return Variant(
        rows,
        width // unit,
        unit,
        src_row,
        dst_row,
        src_paged,
        dst_paged,
        align,
        tile_bytes // unit,
        tile.warps,
        ranges,
    )


def alignment(bits: int) -> int:
    """Return the largest power of two up to 16 that divides all numbers whose bitwise or is `bits`."""
    bits |= _ACCESS
    return bits & -bits


def _lowest_bit(number: int) -> int:
    return number & -number
