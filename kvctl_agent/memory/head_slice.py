"""Numpy views of some heads in a segment's blocks.

Creating these views costs more than copying a short block, and a pool has few head slices but many parts, so a pool
keeps the views while it is open.
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

# Rows are void items, which numpy copies with one memmove each, independent of the pool's dtype.
Rows = npt.NDArray[np.void]


class HeadSlice:
    """Views of local heads [head, head + heads) in every layer of one segment.

    Attributes:
        heads: Heads of the slice.
        whole: Whether the slice has all local heads, so that a page is one row.
        unit_heads: Heads in one row of `takes`: the largest number that divides both the local heads and `heads`.
        units_per_row: Rows of `takes` in one row of a page.
        rows: For each plane, rows of a page.
        page_bytes: For each plane, bytes of the slice in one page.
        takes: For each layer and plane, the one-dimensional contiguous array that a gather indexes: pages if `whole`,
            else units of `unit_heads` adjacent heads. Units are counted from the first head of the slice, which keeps
            them as wide as the slice even if `head` is not a multiple of its width.
        puts: For each layer and plane, the array that a scatter indexes by page: `[num_slots]` if `whole`, else
            `[num_slots, rows]`, strided, which works for any slice.
        runs: For each layer and plane, uint8 `[num_slots, rows, slice bytes]`, strided, for page runs.
        take_rows, put_rows: For each plane, the dtypes with which staging bytes match `takes` and `puts`.
        stack: uint8 `[layers * planes, num_slots, rows, slice bytes]`, strided, over all blocks. None if the blocks are
            not at equal distances or the planes differ.
    """

    def __init__(self, blocks: Sequence[tuple[Bytes, ...]], where: SegmentAddresses, head: int, heads: int) -> None:
        """Create the views; the caller has checked `head` and `heads`.

        Args:
            blocks: The bytes of each plane of each layer.
            where: The addresses of the same blocks.
            head: First local head.
            heads: Number of heads.
        """
        planes = where.shard.segment.planes
        self._where = where
        self._starts = tuple(head * plane.head_bytes for plane in planes)
        self._widths = tuple(heads * plane.head_bytes for plane in planes)
        self.heads = heads
        self.whole = heads == where.shard.heads
        self.rows = tuple(plane.rows for plane in planes)
        self.unit_heads = gcd(where.shard.heads, heads)
        self.units_per_row = where.shard.heads // self.unit_heads
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
        equal_planes = len(set(zip(self.rows, self._widths, strict=True))) == 1
        distances = {after.ctypes.data - before.ctypes.data for before, after in pairwise(blocks)}
        if len(distances) != 1 or not equal_planes:
            return None
        (distance,) = distances
        # A pool may consist of separate tensors, so no single array covers all blocks and as_strided is needed.
        return np.lib.stride_tricks.as_strided(
            blocks[0][self._starts[0] :],
            (len(blocks), where.num_slots, self.rows[0], self._widths[0]),
            (distance, where.page_bytes(0), where.row_bytes(0), 1),
        )


def _row(nbytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, nbytes))
