"""The form of the copy kernel for a geometry at given addresses: the widest words that both allow. Pure arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from kvctl_agent.device.base import Geometry
from kvctl_agent.errors import DeviceError

# One lane's widest access.
_ACCESS = 16


class Tile(NamedTuple):
    """What one thread block copies at a time.

    Attributes:
        nbytes: at most, a power of two.
        warps: of 32 lanes each, a power of two.
    """

    nbytes: int
    warps: int


class Variant(NamedTuple):
    """The kernel's constants, each as `copy_rows` says.

    Attributes:
        tile_units: units that one thread block copies at a time.
        warps: of a thread block.
        strips: whether it copies strips of a table.
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
    strips: bool

    @property
    def word(self) -> int:
        """Bytes of what a lane loads, or of one of two words that become one access."""
        return min(self.align, 8)

    @property
    def page_units(self) -> int:
        return self.rows * self.split

    def tiles(self, pages: int) -> int:
        """Tiles of a block of so many pages."""
        return -(-pages * self.page_units // self.tile_units)


def variant(geometry: Geometry, bits: int, tile: Tile, strips: bool = False) -> Variant:
    """The variant for blocks whose addresses have only these bits set (or-ed together).

    Raises:
        DeviceError: the geometry makes no sense.
    """
    rows, width, src_row, dst_row, src_paged, dst_paged = geometry
    if rows < 1 or not 1 <= width <= min(src_row, dst_row):
        raise DeviceError(f"rows that cannot be: {geometry}")
    if src_row == dst_row == width:
        # A page is contiguous on both sides, and so one row.
        rows, width = 1, rows * width
        src_row = dst_row = width
    align = alignment(width | src_row | dst_row | bits)
    # At most 16 accesses a lane: narrow ones need smaller tiles, or registers spill.
    tile_bytes = min(tile.nbytes, tile.warps * 32 * 16 * align)
    # Whole powers of two, so that no lane idles: nine units of 128 bytes make a row of 1,152.
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
        strips,
    )


def alignment(bits: int) -> int:
    """The largest power of two, up to one access, that divides every number made of these bits."""
    bits |= _ACCESS
    return bits & -bits


def _lowest_bit(number: int) -> int:
    return number & -number
