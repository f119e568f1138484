"""Gather and scatter between a pool's pages and contiguous staging: the product's hot loop, on the CPU.

Every path is one numpy call that copies whole rows with the GIL released, so two threads give twice the rate.
Measured choices (512 B rows; `benchmarks/copy_rates.py` shows them): `np.take` into `out` with clipping is the
only take that neither buffers nor checks per row; `x[idx]` allocates, and copying through it is a third slower.
Scatter assigns through a strided page view, whose index is the page list itself and which takes any head slice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.parts import Piece, Span
from kvctl_agent.memory.rows import RowIndex
from kvctl_agent.memory.slab import Bytes


def gather_piece(piece: Piece, rows: RowIndex, out: Bytes) -> int:
    """Gather all spans of `piece` into `out[:piece.nbytes]`; returns the bytes written."""
    done = 0
    for span in piece.spans:
        done += gather(span, rows, out[done:])
    return done


def scatter_piece(piece: Piece, rows: RowIndex, src: Bytes) -> int:
    """Scatter `src[:piece.nbytes]` to all spans of `piece`; returns the bytes read."""
    done = 0
    for span in piece.spans:
        done += scatter(span, rows, src[done:])
    return done


def gather(span: Span, rows: RowIndex, out: Bytes) -> int:
    """Copy one span's rows into `out`, in the order token, head, dim.

    Args:
        span: layer, K or V, and positions in `rows.pages`.
        rows: the pool, its pages and the head slice.
        out: uint8 `[>= bytes of the span]`, contiguous; best a buffer that is still in cache.

    Returns:
        Bytes written.
    """
    count, row_bytes = _check(span, rows)
    nbytes = count * rows.pool.page_size * rows.heads * row_bytes
    staged = _staged(out, nbytes, "out")
    block = rows.pool.block(span.layer, span.kv)
    if rows.as_runs:
        slices = _page_slices(block, rows, row_bytes, np.dtype(np.uint8))
        target = staged.reshape(count, *slices.shape[1:])
        for page, lo, hi in rows.runs(span.page_lo, span.page_hi):
            np.copyto(target[lo:hi], slices[page : page + hi - lo])
    elif rows.whole:
        row = np.dtype((np.void, rows.pool.page_size * rows.heads * row_bytes))
        np.take(block.view(row), rows.pages[span.page_lo : span.page_hi], out=staged.view(row), mode="clip")
    else:
        unit = np.dtype((np.void, rows.unit_heads * row_bytes))
        shifted = block[rows.head * row_bytes :]
        units = shifted[: shifted.nbytes // unit.itemsize * unit.itemsize].view(unit)
        np.take(units, rows.units(span.page_lo, span.page_hi), out=staged.view(unit), mode="clip")
    return nbytes


def scatter(span: Span, rows: RowIndex, src: Bytes) -> int:
    """Copy `src`, in the order token, head, dim, to one span's rows; the reverse of `gather`.

    Returns:
        Bytes read.
    """
    count, row_bytes = _check(span, rows)
    nbytes = count * rows.pool.page_size * rows.heads * row_bytes
    staged = _staged(src, nbytes, "src")
    block = rows.pool.block(span.layer, span.kv)
    if rows.as_runs:
        slices = _page_slices(block, rows, row_bytes, np.dtype(np.uint8))
        source = staged.reshape(count, *slices.shape[1:])
        for page, lo, hi in rows.runs(span.page_lo, span.page_hi):
            np.copyto(slices[page : page + hi - lo], source[lo:hi])
        return nbytes
    pages = rows.pages[span.page_lo : span.page_hi]
    if rows.whole:
        row = np.dtype((np.void, rows.pool.page_size * rows.heads * row_bytes))
        block.view(row)[pages] = staged.view(row)
    else:
        row = np.dtype((np.void, rows.heads * row_bytes))
        slices = _page_slices(block, rows, row_bytes, row)[:, :, 0]
        slices[pages] = staged.view(row).reshape(count, rows.pool.page_size)
    return nbytes


def _page_slices(block: Bytes, rows: RowIndex, row_bytes: int, item: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """View a block as `[num_pages, page_size, items]`: the head slice of every token of every page."""
    token_bytes = rows.pool.heads * row_bytes
    page_bytes = rows.pool.page_size * token_bytes
    return np.ndarray(
        (block.nbytes // page_bytes, rows.pool.page_size, rows.heads * row_bytes // item.itemsize),
        dtype=item,
        buffer=block,
        offset=rows.head * row_bytes,
        strides=(page_bytes, token_bytes, item.itemsize),
    )


def _check(span: Span, rows: RowIndex) -> tuple[int, int]:
    """(pages in the span, bytes of one head's row), or MemoryLayoutError when the span lies outside `rows`."""
    if not 0 <= span.page_lo < span.page_hi <= len(rows):
        raise MemoryLayoutError(f"{span} lies outside the {len(rows)} pages of the part")
    return span.page_hi - span.page_lo, rows.pool.addresses().row_bytes(span.kv)


def _staged(array: Bytes, nbytes: int, name: str) -> Bytes:
    """The first `nbytes` of staging, or MemoryLayoutError when there are fewer."""
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous or array.nbytes < nbytes:
        raise MemoryLayoutError(
            f"{name}: {array.dtype} {array.shape}, strides {array.strides}; "
            f"the span needs {nbytes} contiguous uint8 in one dimension"
        )
    return array[:nbytes]
