"""Views of a pool's blocks that cut out some heads, built once per slice: parts are many, head slices few.

Making these views costs more than copying a short block, so a pool keeps them for as long as it is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from kvctl_agent.memory.addresses import K, PoolAddresses, V
from kvctl_agent.memory.slab import Bytes

# Void items are opaque rows: numpy moves each with one memmove, whatever the dtype of the pool.
Rows = npt.NDArray[np.void]


class HeadSlice:
    """Local heads [head, head + heads) of every layer of one pool.

    Attributes:
        whole: the slice is all local heads, so a page is one row.
        unit_heads: heads in one row of `takes`: the widest that tiles both a token and the slice.
        page_bytes: (K, V) bytes of one page's slice.
        takes: per (layer, kv) what a gather indexes, 1-D, contiguous: pages where whole, else units of
            `unit_heads` adjacent heads. Units count from the slice's own first head, which keeps them as wide as
            the slice even where `head` is not a multiple of it.
        puts: per (layer, kv) what a scatter indexes by page: `[num_pages]` where whole, else strided
            `[num_pages, page_size]`, which takes any slice.
        runs: per (layer, kv) uint8 `[num_pages, page_size, slice bytes]`, strided, for runs of pages.
        take_rows, put_rows: (K, V) row types under which staging matches `takes` and `puts`.
        planes: uint8 `[2 * layers, num_pages, page_size, slice bytes]`, strided, over K and V of all layers at once,
            where they lie at one distance and K and V rows are alike; else None.
    """

    def __init__(self, blocks: Sequence[tuple[Bytes, Bytes]], where: PoolAddresses, head: int, heads: int) -> None:
        """Build the views; `head` and `heads` have been checked."""
        self.head = head
        self.heads = heads
        self.whole = heads == where.heads
        self.page_size = where.page_size
        self.unit_heads = gcd(where.heads, heads)
        self.units_per_token = where.heads // self.unit_heads
        self.page_bytes = tuple(where.page_size * heads * where.row_bytes(kv) for kv in (K, V))
        if self.whole:
            self.take_rows = self.put_rows = tuple(_row(nbytes) for nbytes in self.page_bytes)
        else:
            self.take_rows = tuple(_row(self.unit_heads * where.row_bytes(kv)) for kv in (K, V))
            self.put_rows = tuple(_row(heads * where.row_bytes(kv)) for kv in (K, V))
        self.takes = [tuple(self._take(pair[kv], where, kv) for kv in (K, V)) for pair in blocks]
        self.puts = [tuple(self._put(pair[kv], where, kv) for kv in (K, V)) for pair in blocks]
        self.runs = [tuple(self._strided(pair[kv], where, kv, np.dtype(np.uint8)) for kv in (K, V)) for pair in blocks]
        self.planes = self._planes(blocks, where)

    def _take(self, block: Bytes, where: PoolAddresses, kv: int) -> Rows:
        shifted = block[self.head * where.row_bytes(kv) :]
        item = self.take_rows[kv]
        return shifted[: shifted.nbytes // item.itemsize * item.itemsize].view(item)

    def _put(self, block: Bytes, where: PoolAddresses, kv: int) -> Rows:
        item = self.put_rows[kv]
        return block.view(item) if self.whole else self._strided(block, where, kv, item)[:, :, 0]

    def _strided(self, block: Bytes, where: PoolAddresses, kv: int, item: np.dtype[np.generic]) -> npt.NDArray[Any]:
        return np.ndarray(
            (where.num_pages, where.page_size, self.heads * where.row_bytes(kv) // item.itemsize),
            dtype=item,
            buffer=block,
            offset=self.head * where.row_bytes(kv),
            strides=(where.page_bytes(kv), where.token_bytes(kv), item.itemsize),
        )

    def _planes(self, blocks: Sequence[tuple[Bytes, Bytes]], where: PoolAddresses) -> npt.NDArray[np.uint8] | None:
        flat = [block for pair in blocks for block in pair]
        distances = {after.ctypes.data - before.ctypes.data for before, after in pairwise(flat)}
        if len(distances) != 1 or where.k_row_bytes != where.v_row_bytes:
            return None
        (distance,) = distances
        # as_strided, because no single array need span all blocks: a pool may be made of separate tensors.
        return np.lib.stride_tricks.as_strided(
            flat[0][self.head * where.row_bytes(K) :],
            (len(flat), where.num_pages, where.page_size, self.heads * where.row_bytes(K)),
            (distance, where.page_bytes(K), where.token_bytes(K), 1),
        )


def _row(nbytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, nbytes))
