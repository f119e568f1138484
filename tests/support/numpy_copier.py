"""Copier of host memory by plain numpy: the reference of the native copies, and of those on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvctl_agent.memory.allocations import Bytes
from kvctl_agent.memory.copier import LandedPart, PendingCopy
from kvctl_agent.memory.host_copier import host_array
from kvctl_agent.memory.part_layout import PIECE_BYTES, Piece, Span
from kvctl_agent.memory.region import MemorySpan
from kvctl_agent.memory.segment import RowIndex


class NumpyCopier:
    """Copies in the calls that begin copies."""

    piece_bytes = PIECE_BYTES
    parts_at_once = 1
    pieces_at_once = 1

    def gather(self, rows: RowIndex, pieces: Sequence[Piece], into: Sequence[MemorySpan]) -> PendingCopy:
        for piece, span in zip(pieces, into, strict=True):
            gather_piece(piece, rows, host_array(span))
        return _Done()

    def scatter(self, landed: Sequence[LandedPart]) -> PendingCopy:
        for rows, layout, region in landed:
            for piece in layout.pieces():
                scatter_piece(piece, rows, host_array(region)[piece.offset :])
        return _Done()

    def close(self) -> None:
        """Does nothing."""


class _Done:
    """A copy that has ended."""

    def done(self) -> bool:
        return True


def gather_piece(piece: Piece, rows: RowIndex, out: Bytes) -> None:
    """Gathers all spans of `piece` into `out[:piece.nbytes]`."""
    at = 0
    for block in _blocks(piece, rows):
        out[at : at + block.size] = block.reshape(-1)
        at += block.size
    assert at == piece.nbytes


def scatter_piece(piece: Piece, rows: RowIndex, src: Bytes) -> None:
    """Scatters `src[:piece.nbytes]` to all spans of `piece`."""
    at = 0
    for block in _blocks(piece, rows):
        block[:] = src[at : at + block.size].reshape(block.shape)
        at += block.size
    assert at == piece.nbytes


def _blocks(piece: Piece, rows: RowIndex) -> list[Bytes]:
    """Returns views `[rows, heads, head_bytes]` of the pages of a piece, in the order of its bytes."""
    return [
        _page(span, rows, int(page)) for span in piece.spans for page in rows.raw_pages[span.page_lo : span.page_hi]
    ]


def _page(span: Span, rows: RowIndex, page: int) -> Bytes:
    memory = rows.memory
    of_page, split = memory.shard.segment.planes[span.plane].rows, memory.addresses.split
    elements = memory.elements(memory.shard.layer_lo + span.layer, span.plane)
    first = page % split * of_page
    return elements[page // split, first : first + of_page, rows.head : rows.head + rows.heads]


def copy_rows(gather: bool, rows: Bytes, row_bytes: int, order: np.ndarray, piece: Bytes) -> None:
    """Copies rows of `rows` into `piece` if `gather`, otherwise back; as `host_copier.copy_rows`."""
    table = rows[: len(rows) // row_bytes * row_bytes].reshape(-1, row_bytes)
    staged = piece[: len(order) * row_bytes].reshape(-1, row_bytes)
    if gather:
        staged[:] = table[order]
    else:
        table[order] = staged
