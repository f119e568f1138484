"""Computes the checksum of a part: the CRC-32 of its bytes in staging order, whichever path it takes.

The prefill and the decode side each compute it from their own pages. A mismatch means that bytes were corrupted on the
wire, in staging or in one of the copies, or that the part was written to another part's pages.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.memory.host_copier import gather_piece
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.segment import RowIndex

# Small enough to stay in cache between the copy and the checksum.
_PIECE_BYTES = 256 << 10


def part_checksum(
    pool: KVPool, transfer_slice: TransferSlice, pages: npt.ArrayLike, head: int, lo: int, hi: int, split: int = 1
) -> int:
    """Returns the 32-bit checksum of a part of KV or state.

    Args:
        pool: The pool of this rank.
        transfer_slice: The slice that the part belongs to.
        pages: Page indices (for state: item indices) in this pool, in the part's order.
        head: First head of the slice, as an index into the heads of this pool.
        lo, hi: The part's layers [lo, hi), in the segment's numbering.
        split: Transfer pages in a page of this pool: the slice's `src_split` or `dst_split`.

    Raises:
        MemoryLayoutError: the part does not lie in this pool.
    """
    memory = pool.segments_at(split)[transfer_slice.segment]
    rows = RowIndex(memory, pages, head, transfer_slice.heads)
    pieces = memory.part_layout(lo, hi, len(rows), transfer_slice.heads).pieces(_PIECE_BYTES)
    scratch = np.empty(max(piece.nbytes for piece in pieces), np.uint8)
    checksum = 0
    for piece in pieces:
        checksum = crc32(scratch.data[: gather_piece(piece, rows, scratch)], checksum)
    return checksum


def aux_checksum(pool: KVPool, row: int) -> int:
    """Returns the 32-bit checksum of an aux row.

    Raises:
        MemoryLayoutError: the pool has no such row.
    """
    if not 0 <= row < pool.aux_slots:
        raise MemoryLayoutError(f"aux row {row} is outside the pool of {pool.aux_slots} rows")
    return crc32(pool.aux_row(row))
