"""Gathers and scatters between a pool's pages and contiguous staging in host memory.

This is the hot loop of transfers on the CPU. Every copy is one numpy call that copies whole rows with the GIL released,
so two threads double the rate. The numpy calls were chosen by measurement (`benchmarks/copy_rates.py` prints the
rates): `take` into `out` with mode="clip" is the only form of take that neither buffers nor checks each row; `x[idx]`
allocates, and copying through it is a third slower. Scatters assign through a strided view of the pages, indexed by the
page list itself. A call costs 1.5 to 2 µs of Python.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.huge_pages import Bytes
from kvctl_agent.memory.part_layout import Piece, Span
from kvctl_agent.memory.row_index import RowIndex

Stack = npt.NDArray[np.uint8]


def gather_piece(piece: Piece, rows: RowIndex, out: Bytes) -> int:
    """Gather all spans of `piece` into `out[:piece.nbytes]` and return the number of bytes written."""
    if _by_page(piece, rows):
        blocks, staged = _stacks(piece, rows, out, "out")
        for page, lo, hi in rows.runs(0, len(rows)):
            staged[:, lo:hi] = blocks[:, page : page + hi - lo]
        return piece.nbytes
    done = 0
    for span in piece.spans:
        done += gather(span, rows, out[done:])
    return done


def scatter_piece(piece: Piece, rows: RowIndex, src: Bytes) -> int:
    """Scatter `src[:piece.nbytes]` to all spans of `piece` and return the number of bytes read."""
    if _by_page(piece, rows):
        blocks, staged = _stacks(piece, rows, src, "src")
        for page, lo, hi in rows.runs(0, len(rows)):
            blocks[:, page : page + hi - lo] = staged[:, lo:hi]
        return piece.nbytes
    done = 0
    for span in piece.spans:
        done += scatter(span, rows, src[done:])
    return done


def _by_page(piece: Piece, rows: RowIndex) -> bool:
    """Whether one call per page run, across all layers of the piece, takes fewer calls than one per block.

    This is so for short rooms: a page of 32 layers is one call instead of 64. A piece of several spans consists of
    consecutive whole blocks, except that the first may be the remainder of a larger block (see `PartLayout.pieces`).
    """
    return rows.slice.stack is not None and len(piece.spans) > rows.run_count and not piece.spans[0].page_lo


def _stacks(piece: Piece, rows: RowIndex, array: Bytes, name: str) -> tuple[Stack, Stack]:
    """The piece's blocks in the pool, and the staging bytes, both as `[blocks, pages, rows, slice bytes]`."""
    stack = rows.slice.stack
    assert stack is not None
    first, last, planes = piece.spans[0], piece.spans[-1], len(rows.slice.rows)
    lo, hi = first.layer * planes + first.plane, last.layer * planes + last.plane + 1
    shape = (hi - lo, len(rows), *stack.shape[2:])
    if hi > len(stack) or piece.nbytes != math.prod(shape) or array.nbytes < piece.nbytes:
        raise MemoryLayoutError(f"{name}: {array.nbytes} bytes are too small for {piece}, or it lies outside the pool")
    return stack[lo:hi], array[: piece.nbytes].reshape(shape)


def gather(span: Span, rows: RowIndex, out: Bytes) -> int:
    """Copy the rows of one span into `out`, ordered by page, row and head.

    Args:
        span: Layer, plane, and positions in `rows.pages`.
        rows: Pages and head slice of a segment.
        out: uint8 `[>= bytes of the span]`, contiguous. Fastest if the buffer is still in cache.

    Returns:
        The number of bytes written.
    """
    layer, plane, page_lo, page_hi = span
    staged = _staged(span, rows, out, "out")
    views = rows.slice
    if rows.as_runs[plane]:
        runs = views.runs[layer][plane]
        target = staged.reshape(page_hi - page_lo, *runs.shape[1:])
        for page, lo, hi in rows.runs(page_lo, page_hi):
            target[lo:hi] = runs[page : page + hi - lo]
    else:
        index = rows.takes(plane, page_lo, page_hi)
        views.takes[layer][plane].take(index, out=staged.view(views.take_rows[plane]), mode="clip")
    return staged.nbytes


def scatter(span: Span, rows: RowIndex, src: Bytes) -> int:
    """Copy `src`, ordered by page, row and head, to the rows of one span; the inverse of `gather`.

    Returns:
        The number of bytes read.
    """
    layer, plane, page_lo, page_hi = span
    staged = _staged(span, rows, src, "src")
    views = rows.slice
    if rows.as_runs[plane]:
        runs = views.runs[layer][plane]
        source = staged.reshape(page_hi - page_lo, *runs.shape[1:])
        for page, lo, hi in rows.runs(page_lo, page_hi):
            runs[page : page + hi - lo] = source[lo:hi]
    else:
        puts = views.puts[layer][plane]
        items = staged.view(views.put_rows[plane])
        puts[rows.pages[page_lo:page_hi]] = items if views.whole else items.reshape(-1, views.rows[plane])
    return staged.nbytes


def _staged(span: Span, rows: RowIndex, array: Bytes, name: str) -> Bytes:
    """The bytes of `array` for the span; raises MemoryLayoutError if they do not fit. The numpy calls do not check."""
    if not 0 <= span.page_lo < span.page_hi <= len(rows.pages):
        raise MemoryLayoutError(f"{span} lies outside the {len(rows)} pages of the part")
    if not 0 <= span.layer < len(rows.slice.takes):
        raise MemoryLayoutError(f"{span} lies outside the {len(rows.slice.takes)} layers of this rank")
    nbytes = (span.page_hi - span.page_lo) * rows.slice.page_bytes[span.plane]
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous or array.nbytes < nbytes:
        raise MemoryLayoutError(
            f"{name}: {array.dtype} {array.shape}, strides {array.strides}; "
            f"the span needs {nbytes} contiguous uint8 in one dimension"
        )
    return array[:nbytes]
