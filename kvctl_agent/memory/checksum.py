"""The checksum of a part: CRC-32 of its bytes as they would lie in staging, whichever path it takes.

Both sides read it out of their own pages, so it says that what was sent is what is there: wrong bytes on the wire, in
staging or in either copy show, and so does a part that went into another's pages.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.memory.copy import gather_piece
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.row_index import RowIndex

# Small enough to stay in cache between the copy and the sum.
_PIECE_BYTES = 256 << 10


def part_checksum(pool: KVPool, share: TransferSlice, pages: npt.ArrayLike, head: int, lo: int, hi: int) -> int:
    """Of KV or state, 32 bits.

    Args:
        pages: of a state its items; in the part's order.
        head: the share's first head, counted in this pool.
        lo, hi: the part's layers [lo, hi), in the segment's numbering.

    Raises:
        MemoryLayoutError: the part is not of this pool.
    """
    memory = pool.segments[share.segment]
    rows = RowIndex(memory, pages, head, share.heads)
    pieces = memory.part_layout(lo, hi, len(rows), share.heads).pieces(_PIECE_BYTES)
    scratch = np.empty(max(piece.nbytes for piece in pieces), np.uint8)
    checksum = 0
    for piece in pieces:
        checksum = crc32(scratch.data[: gather_piece(piece, rows, scratch)], checksum)
    return checksum


def aux_checksum(pool: KVPool, row: int) -> int:
    """Of an aux row, 32 bits.

    Raises:
        MemoryLayoutError: there is no such row.
    """
    if pool.aux is None or not 0 <= row < pool.aux_slots:
        raise MemoryLayoutError(f"aux row {row} is outside the pool of {pool.aux_slots} rows")
    return crc32(pool.aux[row].tobytes())
