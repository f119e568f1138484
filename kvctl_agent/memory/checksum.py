"""Computes the checksum of a part: a sum of mixed words of its bytes in staging order, whichever path it takes.

The prefill and the decode side each compute it from their own pages, on the host or on a GPU, with the same result. A
mismatch means that bytes were corrupted on the wire, in staging or in one of the copies, or that the part was written
to another part's pages.

The part consists of little-endian words of 4 bytes, or of 2 or 1 in planes whose heads are not a multiple of that. Each
word is combined with its position, its offset in the part in bytes modulo 2**32, and mixed:

    x = word ^ (position * 0x9E3779B1)
    x = (x ^ x >> 16) * 0x21F0AAAD
    x = (x ^ x >> 15) * 0x735A2D97
    x = x ^ x >> 15

in unsigned 32-bit arithmetic. The checksum is the sum of all x modulo 2**32, so its words can be added up in any order
and in parallel, unlike those of a CRC. For one position the mix is a bijection of the word (Wellons' lowbias32): any
error within one word is found. Every position has another mix, so that swapped words or pages, a run of zeros and a
shift change the sum as if at random: an error in several words is missed with a probability of about 2**-32. The
checksum is no protection from forgery.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvctl_agent.device.base import PendingChecksum, RowCopies, checksum_word
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.memory.allocations import Bytes
from kvctl_agent.memory.device_copier import block_table
from kvctl_agent.memory.host_copier import gather_piece
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.segment import RowIndex

# Small enough to stay in cache between the copy and the checksum.
_PIECE_BYTES = 256 << 10
# Words that are mixed at once. Larger temporary arrays are returned to the system and faulted in again each time: with
# 64 Ki words the rate, copies included, is 0.9 instead of 2.4 GB/s (that of a CRC-32 3.2).
_BLOCK_WORDS = 16 << 10
_POSITION, _FIRST, _SECOND = np.uint32(0x9E3779B1), np.uint32(0x21F0AAAD), np.uint32(0x735A2D97)


class Checksums(Protocol):
    """Computes checksums of parts in one pool; used by one thread only."""

    def begin(
        self, part: TransferSlice, pages: npt.ArrayLike, head: int, lo: int, hi: int, split: int = 1
    ) -> PendingChecksum:
        """Starts to compute the checksum of a part of KV or state; poll the result until it is done.

        Args:
            part: The slice that the part belongs to.
            pages: Page indices (for state: item indices) in this pool, in the part's order.
            head: First head of the slice, as an index into the heads of this pool.
            lo, hi: The part's layers [lo, hi), in the segment's numbering.
            split: Transfer pages in a page of this pool: the slice's `src_split` or `dst_split`.

        Raises:
            MemoryLayoutError: the part does not lie in this pool.
            DeviceError: the kernel could not be launched.
        """
        ...


class HostChecksums:
    """Computes checksums of parts in host memory, in the calls of `begin`."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def begin(
        self, part: TransferSlice, pages: npt.ArrayLike, head: int, lo: int, hi: int, split: int = 1
    ) -> PendingChecksum:
        return _Known(part_checksum(self._pool, part, pages, head, lo, hi, split))


class DeviceChecksums:
    """Computes checksums of parts in a device's memory by a kernel, on the stream of `copies`."""

    def __init__(self, pool: KVPool, copies: RowCopies) -> None:
        self._pool = pool
        self._copies = copies

    def begin(
        self, part: TransferSlice, pages: npt.ArrayLike, head: int, lo: int, hi: int, split: int = 1
    ) -> PendingChecksum:
        memory = self._pool.segments_at(split)[part.segment]
        rows = RowIndex(memory, pages, head, part.heads)
        layout = memory.part_layout(lo, hi, len(rows), part.heads)
        table = block_table(memory, part.heads)
        first = layout.first_layer * table.planes
        end = first + layout.num_layers * table.planes
        # A gather to address 0: the addresses of its destination are positions.
        launches = table.gather_launches(first, end, 0, len(rows), len(rows), layout.nbytes, head, 0)
        return self._copies.checksum(launches, rows.page_ids)


class _Known(NamedTuple):
    """A checksum that has been computed."""

    value: int

    def done(self) -> bool:
        return True


def part_checksum(
    pool: KVPool, part: TransferSlice, pages: npt.ArrayLike, head: int, lo: int, hi: int, split: int = 1
) -> int:
    """Returns the 32-bit checksum of a part in host memory; arguments and exceptions as for `Checksums.begin`."""
    memory = pool.segments_at(split)[part.segment]
    rows = RowIndex(memory, pages, head, part.heads)
    layout = memory.part_layout(lo, hi, len(rows), part.heads)
    pieces = layout.pieces(_PIECE_BYTES)
    scratch = np.empty(max(piece.nbytes for piece in pieces), np.uint8)
    words = [checksum_word(plane.head_bytes) for plane in memory.shard.segment.planes]
    total = 0
    for piece in pieces:
        gather_piece(piece, rows, scratch)
        spans = [(words[0], piece.nbytes)]
        if len(set(words)) > 1:
            spans = [
                (words[plane], (page_hi - page_lo) * layout.page_bytes[plane])
                for _, plane, page_lo, page_hi in piece.spans
            ]
        at = 0
        for word, nbytes in spans:
            total += bytes_checksum(scratch[at : at + nbytes], word, piece.offset + at)
            at += nbytes
    return total & 0xFFFFFFFF


def bytes_checksum(data: Bytes, word: int, position: int) -> int:
    """Returns what `data` contributes to the checksum of a part, modulo 2**32.

    Args:
        data: Contiguous bytes, a whole number of words.
        word: Bytes of a word: 4, 2 or 1.
        position: Offset of the data in the part.
    """
    words = data.view(f"<u{word}")
    total = 0
    for at in range(0, len(words), _BLOCK_WORDS):
        block = words[at : at + _BLOCK_WORDS]
        start = (position + at * word) * int(_POSITION) & 0xFFFFFFFF
        mixed = _multiples(word)[: len(block)] + np.uint32(start)
        mixed ^= block
        shifted = np.empty_like(mixed)
        for shift, factor in ((16, _FIRST), (15, _SECOND)):
            np.right_shift(mixed, np.uint32(shift), out=shifted)
            mixed ^= shifted
            mixed *= factor
        np.right_shift(mixed, np.uint32(15), out=shifted)
        mixed ^= shifted
        total += int(mixed.sum(dtype=np.uint32))
    return total & 0xFFFFFFFF


@lru_cache
def _multiples(word: int) -> npt.NDArray[np.uint32]:
    """Returns the multiples of the positions of a block's words, from position 0 on; callers must not modify them."""
    return np.arange(_BLOCK_WORDS, dtype=np.uint32) * np.uint32(word) * _POSITION


def aux_checksum(pool: KVPool, row: int) -> int:
    """Returns the checksum of an aux row, which is always in host memory: the CRC-32 of its bytes.

    Raises:
        MemoryLayoutError: the pool has no such row.
    """
    if not 0 <= row < pool.aux_slots:
        raise MemoryLayoutError(f"aux row {row} is outside the pool of {pool.aux_slots} rows")
    return crc32(pool.aux_row(row))
