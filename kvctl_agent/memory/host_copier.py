"""Copies in host memory: numpy's, done when the call returns."""

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


class _Done:
    """What was done at once."""

    def done(self) -> bool:
        return True


class HostCopier:
    """Copies with the threads of `crew`, which its owner closes and others may share."""

    piece_bytes = PIECE_BYTES
    parts_at_once = 1  # a part that is in its pages should not wait for another's copy

    def __init__(self, crew: CopyPool) -> None:
        self._crew = crew
        self.pieces_at_once = crew.threads

    def gather(self, rows: RowIndex, pieces: Sequence[Piece], into: Sequence[MemorySpan]) -> PendingCopy:
        arrays = [_array(stretch) for stretch in into]
        work = zip(pieces, arrays, strict=True)
        self._crew.run([partial(gather_piece, piece, rows, array) for piece, array in work])
        return _Done()

    def scatter(self, landed: Sequence[LandedPart]) -> PendingCopy:
        jobs = []
        for rows, layout, region in landed:
            array = _array(region)
            jobs += [partial(scatter_piece, piece, rows, array[piece.offset :]) for piece in layout.pieces()]
        self._crew.run(jobs)
        return _Done()

    def prepare(self, memory: SegmentMemory, head: int, heads: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing: the crew is its owner's."""


def _array(stretch: MemorySpan) -> Bytes:
    if stretch.array is None:
        raise MemoryLayoutError(f"staging memory at {stretch.addr:#x} is on a device; the host cannot copy it")
    return stretch.array
