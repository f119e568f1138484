"""Copier for host memory: numpy copies between a pool's pages and contiguous staging, on the threads of a copy pool.

It is used where the native extension is not built (`native_copier`), and is the reference of that extension's tests.
Every copy is one numpy call that copies whole rows with the GIL released, and one core cannot saturate the memory bus,
so two threads double the rate. The numpy calls were chosen by measurement (`benchmarks/copy_rates.py` prints the
rates): `take` into `out` with mode="clip" is the only form of take that neither buffers nor checks each row; `x[idx]`
allocates, and copying through it is a third slower. Scatters assign through a strided view of the pages, indexed by the
page list itself. A call costs 1.5 to 2 µs of Python. Planes that are not contiguous are copied more simply and more
slowly, through a view of their strides.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import gcd
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import LocalProtocolError, MemoryLayoutError
from kvctl_agent.memory.addresses import Indices, SegmentAddresses
from kvctl_agent.memory.allocations import Bytes
from kvctl_agent.memory.copier import LandedPart, PendingCopy
from kvctl_agent.memory.part_layout import PIECE_BYTES, Piece, Span
from kvctl_agent.memory.region import MemorySpan
from kvctl_agent.memory.segment import RowIndex, SegmentMemory


class HostCopier:
    """Copies parts in host memory with a copy pool, which may be shared and is closed by its owner."""

    piece_bytes = PIECE_BYTES
    parts_at_once = 1  # so that a part is complete as soon as its own copy has ended

    def __init__(self, copy_pool: CopyPool) -> None:
        self._copy_pool = copy_pool
        self.pieces_at_once = max(1, copy_pool.threads)

    def gather(self, rows: RowIndex, pieces: Sequence[Piece], into: Sequence[MemorySpan]) -> PendingCopy:
        host_rows(rows)  # creates the index arrays once, not in every thread
        work = zip(pieces, into, strict=True)
        jobs = [partial(gather_piece, piece, rows, host_array(span)) for piece, span in work]
        return self._copy_pool.begin(jobs, sum(piece.nbytes for piece in pieces))

    def scatter(self, landed: Sequence[LandedPart]) -> PendingCopy:
        jobs = []
        for rows, layout, region in landed:
            host_rows(rows)
            array = host_array(region)
            jobs += [partial(scatter_piece, piece, rows, array[piece.offset :]) for piece in layout.pieces()]
        return self._copy_pool.begin(jobs, sum(part.layout.region_bytes for part in landed))

    def close(self) -> None:
        """Does nothing: the owner of the copy pool closes it."""


def host_array(span: MemorySpan) -> Bytes:
    """Returns the bytes of a span; raises MemoryLayoutError if it is on a device."""
    if span.array is None:
        raise MemoryLayoutError(f"staging memory at {span.addr:#x} is on a device; the host cannot copy it")
    return span.array


Stack = npt.NDArray[np.uint8]


def gather_piece(piece: Piece, rows: RowIndex, out: Bytes) -> int:
    """Gathers all spans of `piece` into `out[:piece.nbytes]` and returns the number of bytes written."""
    index = host_rows(rows)
    if _by_page(piece, index):
        blocks, staged = _stacks(piece, index, out, "out")
        for page, lo, hi in index.runs(0, len(index.pages)):
            staged[:, lo:hi] = blocks[:, page : page + hi - lo]
        return piece.nbytes
    done = 0
    for span in piece.spans:
        done += gather(span, index, out[done:])
    return done


def scatter_piece(piece: Piece, rows: RowIndex, src: Bytes) -> int:
    """Scatters `src[:piece.nbytes]` to all spans of `piece` and returns the number of bytes read."""
    index = host_rows(rows)
    if _by_page(piece, index):
        blocks, staged = _stacks(piece, index, src, "src")
        for page, lo, hi in index.runs(0, len(index.pages)):
            blocks[:, page : page + hi - lo] = staged[:, lo:hi]
        return piece.nbytes
    done = 0
    for span in piece.spans:
        done += scatter(span, index, src[done:])
    return done


def _by_page(piece: Piece, rows: HostRows) -> bool:
    """Returns whether one call per page run, across all layers of the piece, takes fewer calls than one per block.

    That is the case for short rooms: a page of 32 layers is one call instead of 64. A piece of several spans consists
    of consecutive whole blocks, except that the first may be the remainder of a larger block (see `PartLayout.pieces`).
    """
    return rows.slice.stack is not None and len(piece.spans) > rows.run_count and not piece.spans[0].page_lo


def _stacks(piece: Piece, rows: HostRows, array: Bytes, name: str) -> tuple[Stack, Stack]:
    """Returns the piece's blocks `[blocks, num_slots, rows, slice bytes]` and its staging bytes as such an array.

    The second dimension of the staging bytes is the pages of the part. `name` is for error texts.

    Raises:
        MemoryLayoutError: `array` is too small, or the piece lies outside the pool.
    """
    stack = rows.slice.stack
    assert stack is not None
    first, last, planes = piece.spans[0], piece.spans[-1], len(rows.slice.rows)
    lo, hi = first.layer * planes + first.plane, last.layer * planes + last.plane + 1
    shape = (hi - lo, len(rows.pages), *stack.shape[2:])
    if hi > len(stack) or piece.nbytes != math.prod(shape) or array.nbytes < piece.nbytes:
        raise MemoryLayoutError(f"{name}: {array.nbytes} bytes are too small for {piece}, or it lies outside the pool")
    return stack[lo:hi], array[: piece.nbytes].reshape(shape)


def gather(span: Span, rows: HostRows, out: Bytes) -> int:
    """Copies the rows of one span into `out`, ordered by page, row and head.

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
    if views.elements is not None:
        elements = views.elements[layer][plane]
        staged.view(elements.dtype).reshape(-1, *elements.shape[2:])[:] = elements[
            views.places(rows.pages[page_lo:page_hi])
        ]
    elif rows.as_runs[plane]:
        runs = views.runs[layer][plane]
        target = staged.reshape(page_hi - page_lo, *runs.shape[1:])
        for page, lo, hi in rows.runs(page_lo, page_hi):
            target[lo:hi] = runs[page : page + hi - lo]
    else:
        index = rows.takes(plane, page_lo, page_hi)
        views.takes[layer][plane].take(index, out=staged.view(views.take_rows[plane]), mode="clip")
    return staged.nbytes


def scatter(span: Span, rows: HostRows, src: Bytes) -> int:
    """Copies `src`, ordered by page, row and head, to the rows of one span; the inverse of `gather`.

    Returns:
        The number of bytes read.
    """
    layer, plane, page_lo, page_hi = span
    staged = _staged(span, rows, src, "src")
    views = rows.slice
    if views.elements is not None:
        elements = views.elements[layer][plane]
        places = views.places(rows.pages[page_lo:page_hi])
        elements[places] = staged.view(elements.dtype).reshape(-1, *elements.shape[2:])
    elif rows.as_runs[plane]:
        runs = views.runs[layer][plane]
        source = staged.reshape(page_hi - page_lo, *runs.shape[1:])
        for page, lo, hi in rows.runs(page_lo, page_hi):
            runs[page : page + hi - lo] = source[lo:hi]
    else:
        puts = views.puts[layer][plane]
        items = staged.view(views.put_rows[plane])
        puts[rows.pages[page_lo:page_hi]] = items if views.whole else items.reshape(-1, views.rows[plane])
    return staged.nbytes


def _staged(span: Span, rows: HostRows, array: Bytes, name: str) -> Bytes:
    """Returns the bytes of `array` that the span fills. The numpy calls make no checks, so this function does.

    Raises:
        MemoryLayoutError: the span lies outside the part or the rank, or `array` is too small or not contiguous.
    """
    if not 0 <= span.page_lo < span.page_hi <= len(rows.pages):
        raise MemoryLayoutError(f"{span} lies outside the {len(rows.pages)} pages of the part")
    if not 0 <= span.layer < rows.slice.layers:
        raise MemoryLayoutError(f"{span} lies outside the {rows.slice.layers} layers of this rank")
    nbytes = (span.page_hi - span.page_lo) * rows.slice.page_bytes[span.plane]
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous or array.nbytes < nbytes:
        raise MemoryLayoutError(
            f"{name}: {array.dtype} {array.shape}, strides {array.strides}; "
            f"the span needs {nbytes} contiguous uint8 in one dimension"
        )
    return array[:nbytes]


# Page runs of at least this size are copied as runs. For shorter runs, a Python call per run costs more than it saves.
_RUN_BYTES = 128 << 10

_ZERO = np.zeros(1, np.int64)


class HostRows:
    """The pages of one part as index arrays for numpy, with views of its heads.

    Attributes:
        pages: The pages, int64 `[num_pages]`.
        slice: Views of the part's heads in every layer.
        run_count: Number of runs of consecutive ascending pages.
        as_runs: For each plane, whether to copy page runs instead of single pages; faster if the runs are long.
    """

    def __init__(self, rows: RowIndex) -> None:
        """Converts the pages; raises MemoryLayoutError if the memory is on a device."""
        self.pages: Indices = np.ascontiguousarray(rows.raw_pages, dtype=np.int64)
        self.slice = head_slice(rows.memory, rows.head, rows.heads)
        steps = self.pages[1:] - self.pages[:-1]
        self._run_starts: Indices = np.concatenate((_ZERO, np.flatnonzero(steps != 1) + 1))
        self.run_count = len(self._run_starts)
        self.as_runs = tuple(
            self.run_count == 1 or len(self.pages) * page_bytes >= self.run_count * _RUN_BYTES
            for page_bytes in self.slice.page_bytes
        )
        self._units: dict[int, Indices] = {}

    def takes(self, plane: int, page_lo: int, page_hi: int) -> Indices:
        """Returns the indices into the plane's `slice.takes` of `pages[page_lo:page_hi]`, in staging order."""
        if self.slice.whole:
            return self.pages[page_lo:page_hi]
        rows = self.slice.rows[plane]
        units = self._units.get(rows)
        if units is None:
            row_indices = self.pages[:, None] * rows + np.arange(rows, dtype=np.int64)
            first = row_indices.reshape(-1, 1) * self.slice.units_per_row
            units = self._units[rows] = (first + np.arange(self.slice.heads // self.slice.unit_heads)).reshape(-1)
        per_page = len(units) // len(self.pages)
        return units[page_lo * per_page : page_hi * per_page]

    def runs(self, page_lo: int, page_hi: int) -> Iterator[tuple[int, int, int]]:
        """Yields the runs of `pages[page_lo:page_hi]` as (first page, lo, hi), with lo and hi relative to `page_lo`."""
        if self.run_count == 1:
            yield int(self.pages[page_lo]), 0, page_hi - page_lo
            return
        inside = self._run_starts[slice(*np.searchsorted(self._run_starts, (page_lo + 1, page_hi)))]
        for lo, hi in pairwise([page_lo, *inside.tolist(), page_hi]):
            yield int(self.pages[lo]), lo - page_lo, hi - page_lo


def host_rows(rows: RowIndex) -> HostRows:
    """Returns the index arrays of the rows, which are created on first use and kept in `rows`."""
    if rows.host_rows is None:
        rows.host_rows = HostRows(rows)
    index: HostRows = rows.host_rows
    return index


# Rows are void items, which numpy copies with one memmove each, independent of the pool's dtype.
Rows = npt.NDArray[np.void]


class HeadSlice:
    """Numpy views of local heads [head, head + heads) in every layer of one segment.

    Creating the views costs more than copying a short block, and a pool has few head slices but many parts, so
    `head_slice` keeps them while the pool is open.

    Attributes:
        layers: Number of layers.
        heads: Number of heads in the slice.
        elements: None if all planes are contiguous. Else for each layer and plane, the slice as a strided array
            `[engine pages, split, rows, heads]` of items of `head_bytes`; the next attributes are then not used.
        whole: Whether the slice has all local heads, so that a page is one row.
        unit_heads: Heads in one row of `takes`: the largest number that divides both the local heads and `heads`.
        units_per_row: Rows of `takes` in one row of a page.
        rows: For each plane, number of rows of a page.
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
        """Creates the views; the caller has checked the heads.

        Args:
            blocks: For each layer, the bytes of each plane.
            where: Addresses of the blocks.
            head: First local head.
            heads: Number of heads.
        """
        planes = where.shard.segment.planes
        self.layers = len(blocks)
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
        self.stack: npt.NDArray[np.uint8] | None = None
        self.elements: list[tuple[Rows, ...]] | None = None
        if not all(map(where.contiguous, range(len(planes)))):
            self.elements = [
                tuple(self._elements(block, plane, head) for plane, block in enumerate(layer)) for layer in blocks
            ]
            return
        byte = np.dtype(np.uint8)
        self.takes = [tuple(self._take(block, plane) for plane, block in enumerate(layer)) for layer in blocks]
        self.puts = [tuple(self._put(block, plane) for plane, block in enumerate(layer)) for layer in blocks]
        self.runs = [tuple(self._strided(block, plane, byte) for plane, block in enumerate(layer)) for layer in blocks]
        self.stack = self._stack([block for layer in blocks for block in layer])

    def places(self, pages: Indices) -> tuple[Indices, Indices]:
        """Returns the indices of pages in the first two dimensions of `elements`."""
        split = np.int64(self._where.split)
        return pages // split, pages % split

    def _elements(self, block: Bytes, plane: int, head: int) -> Rows:
        where, split = self._where, self._where.split
        page, row, head_stride = where.strides[plane]
        return np.ndarray(
            (where.num_slots // split, split, self.rows[plane], self.heads),
            dtype=_row(where.shard.segment.planes[plane].head_bytes),
            buffer=block,
            offset=head * head_stride,
            strides=(page, where.split_stride(plane), row, head_stride),
        )

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


def head_slice(memory: SegmentMemory, head: int, heads: int) -> HeadSlice:
    """Returns the cached views of local heads [head, head + heads).

    Raises:
        MemoryLayoutError: the rank lacks one of these heads, or the memory is on a device.
    """
    key = "head slice", head, heads
    views: HeadSlice | None = memory.derived.get(key)
    if views is None:
        memory.check_heads(head, heads)
        blocks = [tuple(map(memory.view, layer)) for layer in memory.blocks]
        views = memory.derived[key] = HeadSlice(blocks, memory.addresses, head, heads)
    return views


def copy_rows(gather: bool, rows: Bytes, row_bytes: int, order: npt.NDArray[np.int64], piece: Bytes) -> None:
    """Copies rows of `rows` into `piece` if `gather`, otherwise back; see `native_copier.copy_rows`."""
    all_rows = rows[: len(rows) // row_bytes * row_bytes].view(_row(row_bytes))
    staged = piece[: len(order) * row_bytes].view(_row(row_bytes))
    if gather:
        np.take(all_rows, order, out=staged, mode="clip")
    else:
        all_rows[order] = staged


def _row(nbytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, nbytes))


# Handing a copy to another thread takes longer than copying this much.
_INLINE_BYTES = 256 << 10


class CopyPool:
    """Copies on threads of its own, so that the control loop does not wait for bytes; without threads, on the loop.

    The owner must close the pool. The threads are daemons, so a process whose owner does not close it still exits.
    """

    def __init__(self, threads: int = 0, name: str = "kvctl-copy", wake: Callable[[], None] = lambda: None) -> None:
        """Creates a pool whose threads are started by `start`.

        Args:
            threads: Number of threads; with 0, a copy makes progress in the calls of its `done`, one job per call.
            name: Prefix of the threads' names.
            wake: Called by a thread when a copy has ended.
        """
        self.threads = threads
        self._wake = wake
        self._copies: SimpleQueue[_Copy | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]

    def start(self) -> CopyPool:
        """Starts the threads; returns the pool itself."""
        for thread in self._threads:
            thread.start()
        return self

    def begin(self, jobs: Sequence[Callable[[], object]], nbytes: int) -> PendingCopy:
        """Begins a copy that consists of `jobs`, which run in any order; `nbytes` is what they copy together.

        Once a job has raised an exception, no further job is started; `done` raises it when the running jobs have
        ended.

        Raises:
            LocalProtocolError: the pool is closed.
        """
        if self._closed:
            raise LocalProtocolError("the copy pool is closed; its owner must stop copying before closing it")
        copy = _Copy(jobs, self._wake)
        if self._threads and nbytes > _INLINE_BYTES:
            copy.shared = True
            for _ in self._threads[: len(jobs)]:
                self._copies.put(copy)
        return copy

    def close(self) -> None:
        """Stops and joins the threads; idempotent. Copies that have begun are finished first."""
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._copies.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            while copy.run_job():
                pass


class _Copy:
    """A copy in progress. Threads take one job at a time, so a slower core runs fewer jobs.

    Attributes:
        shared: Whether the pool's threads run the jobs, and not the caller of `done`.
    """

    def __init__(self, jobs: Sequence[Callable[[], object]], wake: Callable[[], None]) -> None:
        self.shared = False
        self._jobs: Iterator[Callable[[], object]] = iter(jobs)
        self._wake = wake
        self._left = len(jobs)
        self._running = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        if not self.shared:
            self.run_job()
        if self._running or (self._left and self._error is None):
            return False
        if self._error is not None:
            raise self._error
        return True

    def run_job(self) -> bool:
        """Runs one job; returns False if none was left or one has failed."""
        with self._lock:
            job = None if self._error else next(self._jobs, None)
            if job is None:
                return False
            self._running += 1
        error = None
        try:
            job()
        except BaseException as raised:
            error = raised
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            self._running -= 1
            over = not self._running and (not self._left or self._error is not None)
        if over and self.shared:
            self._wake()
        return True
