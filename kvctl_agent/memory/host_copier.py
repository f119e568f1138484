"""Copier for host memory: numpy copies that have ended when the call returns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.copier import LandedPart, PendingCopy
from kvctl_agent.memory.copy import gather_piece, scatter_piece
from kvctl_agent.memory.copy_pool import CopyPool
from kvctl_agent.memory.huge_pages import Bytes
from kvctl_agent.memory.part_layout import PIECE_BYTES, Piece
from kvctl_agent.memory.region import MemorySpan
from kvctl_agent.memory.row_index import RowIndex
from kvctl_agent.memory.segment import SegmentMemory


class _CompletedCopy:
    """A copy that has already ended."""

    def done(self) -> bool:
        return True


class HostCopier:
    """Copies with the threads of a copy pool, which may be shared and is closed by its owner."""

    piece_bytes = PIECE_BYTES
    parts_at_once = 1  # so that a part is complete as soon as its own copy has ended

    def __init__(self, copy_pool: CopyPool) -> None:
        self._copy_pool = copy_pool
        self.pieces_at_once = copy_pool.threads

    def gather(self, rows: RowIndex, pieces: Sequence[Piece], into: Sequence[MemorySpan]) -> PendingCopy:
        arrays = [_array(span) for span in into]
        work = zip(pieces, arrays, strict=True)
        self._copy_pool.run([partial(gather_piece, piece, rows, array) for piece, array in work])
        return _CompletedCopy()

    def scatter(self, landed: Sequence[LandedPart]) -> PendingCopy:
        jobs = []
        for rows, layout, region in landed:
            array = _array(region)
            jobs += [partial(scatter_piece, piece, rows, array[piece.offset :]) for piece in layout.pieces()]
        self._copy_pool.run(jobs)
        return _CompletedCopy()

    def prepare(self, memory: SegmentMemory, head: int, heads: int) -> None:
        """Do nothing: host copies need no compilation."""

    def close(self) -> None:
        """Do nothing: the owner of the copy pool closes it."""


def _array(span: MemorySpan) -> Bytes:
    if span.array is None:
        raise MemoryLayoutError(f"staging memory at {span.addr:#x} is on a device; the host cannot copy it")
    return span.array
