"""Views of a segment's blocks that cut out some heads, built once per slice: parts are many, head slices few.

Making these views costs more than copying a short block, so a pool keeps them for as long as it is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from kvctl_agent.memory.addresses import SegmentAddresses
from kvctl_agent.memory.huge_pages import Bytes

# Void items are opaque rows: numpy moves each with one memmove, whatever the dtype of the pool.
Rows = npt.NDArray[np.void]


class HeadSlice:
    """Local heads [head, head + heads) of every layer of one segment.

    Attributes:
        whole: the slice is all local heads, so a page is one row.
        unit_heads: heads in one row of `takes`: the widest that tiles both a row and the slice.
        rows: for each plane, rows of a page.
        page_bytes: for each plane, bytes of one page's slice.
        takes: per (layer, plane) what a gather indexes, 1-D, contiguous: pages where whole, else units of
            `unit_heads` adjacent heads. Units count from the slice's own first head, which keeps them as wide as
            the slice even where `head` is not a multiple of it.
        puts: per (layer, plane) what a scatter indexes by page: `[num_slots]` where whole, else strided
            `[num_slots, rows]`, which takes any slice.
        runs: per (layer, plane) uint8 `[num_slots, rows, slice bytes]`, strided, for runs of pages.
        take_rows, put_rows: for each plane, row types under which staging matches `takes` and `puts`.
        stack: uint8 `[layers * planes, num_slots, rows, slice bytes]`, strided, over all blocks at once, where they lie
            at one distance and planes are alike; else None.
    """

    def __init__(self, blocks: Sequence[tuple[Bytes, ...]], where: SegmentAddresses, head: int, heads: int) -> None:
        """Build the views; `head` and `heads` have been checked."""
        planes = where.held.segment.planes
        self._where = where
        self._starts = tuple(head * plane.head_bytes for plane in planes)
        self._widths = tuple(heads * plane.head_bytes for plane in planes)
        self.heads = heads
        self.whole = heads == where.held.heads
        self.rows = tuple(plane.rows for plane in planes)
        self.unit_heads = gcd(where.held.heads, heads)
        self.units_per_row = where.held.heads // self.unit_heads
        self.page_bytes = tuple(plane.rows * width for plane, width in zip(planes, self._widths, strict=True))
        if self.whole:
            self.take_rows = self.put_rows = tuple(_row(nbytes) for nbytes in self.page_bytes)
        else:
            self.take_rows = tuple(_row(self.unit_heads * plane.head_bytes) for plane in planes)
            self.put_rows = tuple(_row(width) for width in self._widths)
        byte = np.dtype(np.uint8)
        self.takes = [tuple(self._take(block, plane) for plane, block in enumerate(layer)) for layer in blocks]
        self.puts = [tuple(self._put(block, plane) for plane, block in enumerate(layer)) for layer in blocks]
        self.runs = [tuple(self._strided(block, plane, byte) for plane, block in enumerate(layer)) for layer in blocks]
        self.stack = self._stack([block for layer in blocks for block in layer])

    def _take(self, block: Bytes, plane: int) -> Rows:
        shifted = block[self._starts[plane] :]
        item = self.take_rows[plane]
        return shifted[: shifted.nbytes // item.itemsize * item.itemsize].view(item)

    def _put(self, block: Bytes, plane: int) -> Rows:
        item = self.put_rows[plane]
        return block.view(item) if self.whole else self._strided(block, plane, item)[:, :, 0]

    def _strided(self, block: Bytes, plane: int, item: np.dtype[np.generic]) -> npt.NDArray[Any]:
        where = self._where
        return np.ndarray(
            (where.num_slots, self.rows[plane], self._widths[plane] // item.itemsize),
            dtype=item,
            buffer=block,
            offset=self._starts[plane],
            strides=(where.page_bytes(plane), where.row_bytes(plane), item.itemsize),
        )

    def _stack(self, blocks: Sequence[Bytes]) -> npt.NDArray[np.uint8] | None:
        where = self._where
        alike = len(set(zip(self.rows, self._widths, strict=True))) == 1
        distances = {after.ctypes.data - before.ctypes.data for before, after in pairwise(blocks)}
        if len(distances) != 1 or not alike:
            return None
        (distance,) = distances
        # as_strided, because no single array need span all blocks: a pool may be made of separate tensors.
        return np.lib.stride_tricks.as_strided(
            blocks[0][self._starts[0] :],
            (len(blocks), where.num_slots, self.rows[0], self._widths[0]),
            (distance, where.page_bytes(0), where.row_bytes(0), 1),
        )


def _row(nbytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, nbytes))
